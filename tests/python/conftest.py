# SPDX-License-Identifier: Apache-2.0
import logging

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed():
    """Every test starts from the same seed, and hears every log line again."""
    from fusedmoe.integrations import layers

    layers._said.clear()
    torch.set_num_threads(1)  # the tensors are tiny; a busy machine turns OpenMP's waiting into minutes
    torch.manual_seed(0)
    logging.getLogger("fusedmoe").setLevel(logging.INFO)
    yield
