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
    settings.register_profile("fixed", derandomize=True)  # the same draws in every run; --hypothesis-profile=default for new ones
    settings.load_profile("fixed")
except ImportError:
    pass


def pytest_collection_modifyitems(items):
    """test_pool counts every block of the process: it runs before other modules have gradients that they keep."""
    items.sort(key=lambda item: item.path.name != "test_pool.py")


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
