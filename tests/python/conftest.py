# SPDX-License-Identifier: Apache-2.0
import logging
import tempfile
from pathlib import Path

import pytest
import torch

try:
    from hypothesis import settings
    from hypothesis.configuration import set_hypothesis_home_dir

    set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "fusedmoe-hypothesis")  # nothing is left in the tree
    settings.register_profile("fixed", derandomize=True)  # the same draws in every run
    settings.register_profile("drawn", print_blob=True)  # new ones, from --hypothesis-seed=N on: make test-full
    settings.load_profile("fixed")
except ImportError:
    pass


@pytest.fixture(autouse=True)
def _fixed():
    """Every test starts from the same seed, and hears every log line again."""
    from fusedmoe import _core
    from fusedmoe.integrations import layers

    _core.pool_from(1)  # every gradient, however small, is in memory that was used before
    layers._said.clear()
    torch.set_num_threads(1)  # the tensors are tiny; a busy machine turns OpenMP's waiting into minutes
    torch.manual_seed(0)
    logging.getLogger("fusedmoe").setLevel(logging.INFO)
    yield
