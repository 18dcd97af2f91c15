# SPDX-License-Identifier: Apache-2.0
"""For ms-swift: ``swift sft --external_plugins <this file> --experts_impl fusedmoe ...`` (transformers v5)."""

from fusedmoe.integrations.transformers import register

register()
