# SPDX-License-Identifier: Apache-2.0
"""How models of other packages come to use fusedmoe: transformers, LLaMA-Factory, ms-swift."""
