# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's own functions reach our kernels. Needs llamafactory 0.9.4 or 0.9.5 (see run_versions.sh)."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from common import V5, step, tiny, worst

pytest.importorskip("llamafactory")
interface = pytest.importorskip("llamafactory.v1.plugins.model_plugins.kernels.interface")

import fusedmoe  # noqa: E402
from fusedmoe.integrations import llamafactory as ours  # noqa: E402
from fusedmoe.kernels.ops.mlp.npu_fused_moe import NpuFusedMoEKernel  # noqa: E402

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(2))
AUTOLOADED = "fused_moe" in getattr(interface, "default_kernels", {})
ours.register()


class Npu:
    type = "npu"


def as_npu(monkeypatch) -> None:
    """Make this process look like one on an NPU whose torch_npu and CANN are there."""
    import types

    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *a, **k: Npu)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(NpuFusedMoEKernel, "missing", lambda model=None: None)


def test_its_registry_holds_ours():
    assert interface.default_kernels["npu_fused_moe"] is NpuFusedMoEKernel
    assert "fused_moe" in interface.default_kernels and "cpu_fused_moe" in interface.default_kernels
    assert "npu_fused_moe" not in interface.get_default_kernels()  # this machine has none


def test_its_apply_kernel_reaches_ours(monkeypatch):
    model = tiny("Qwen3Moe")
    with pytest.raises(RuntimeError, match="npu.*cpu"):
        interface.apply_kernel("npu_fused_moe", model=model)
    with pytest.raises(ValueError, match="HFModel instance is required"):
        interface.apply_kernel("npu_fused_moe")
    want = step(model, IDS)
    as_npu(monkeypatch)
    interface.apply_kernel("npu_fused_moe", model=model)
    assert any("_fmoe_layer" in vars(m) or "forward" in vars(m) for m in model.modules())
    assert worst(step(model, IDS), want) <= 1e-5


@pytest.mark.parametrize("kernels", ["auto", True, "fused_moe", "cpu_fused_moe"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen3VLMoe"])
def test_kernel_config_and_use_v1_kernels(kernels, family):
    model = tiny(family)
    want = step(model, IDS)
    assert interface.apply_default_kernels(model=model, include_kernels=kernels) is model
    assert any("_fmoe_layer" in vars(m) or "forward" in vars(m) for m in model.modules())
    assert worst(step(model, IDS), want) <= 1e-5


@pytest.mark.parametrize("kernels", ["auto", "fused_moe"])
def test_its_log_has_one_line(kernels):
    """At the level that it shows by default, for each model."""
    seen = []
    handler, logger = logging.Handler(), logging.getLogger("llamafactory.v1")
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)
    try:
        for _ in range(2):
            interface.apply_default_kernels(model=tiny("Qwen3Moe"), include_kernels=kernels)
    finally:
        logger.removeHandler(handler)
    assert [text for text in seen if "MoE" in text] == ["fusedmoe: 2 MoE layers fused (SwiGLU, f32, cpu)"] * 2
    assert logger.isEnabledFor(logging.INFO)


def test_nothing_happens_unasked():
    model = tiny("Qwen3Moe")
    for nothing in (None, False, ""):
        interface.apply_default_kernels(model=model, include_kernels=nothing)
    assert not any("_fmoe_layer" in vars(m) for m in model.modules())
    with pytest.raises(ValueError, match="nope"):
        interface.apply_default_kernels(model=model, include_kernels="nope")


@pytest.mark.skipif(not V5, reason="the plugin form came with 0.9.5's successors; any version will do, one is enough")
def test_the_plugin_form(monkeypatch):
    """The interface of LLaMA-Factory after 0.9.5: KernelPlugin holds classes, auto sets go by device."""
    import types

    class KernelPlugin:
        _registry = {"npu_fused_moe": object, "npu_fused_rope": object}

    base = types.ModuleType("base")
    base.KernelPlugin = KernelPlugin
    new = types.ModuleType("interface")
    new._AUTO_KERNELS = {"npu": ("npu_fused_moe",)}
    package = "llamafactory.v1.plugins.model_plugins.kernels"
    monkeypatch.setitem(sys.modules, f"{package}.interface", new)
    monkeypatch.setitem(sys.modules, f"{package}.base", base)
    assert ours.register()
    assert KernelPlugin._registry["npu_fused_moe"] is NpuFusedMoEKernel
    assert KernelPlugin._registry["npu_fused_rope"] is object
    assert new._AUTO_KERNELS == {"npu": ("npu_fused_moe",), "cpu": ("fused_moe",)}
    model = tiny("Qwen3Moe")
    assert KernelPlugin._registry["fused_moe"].apply(model=model, config={"name": "fused_moe"}, require_logits=True) is model


def test_every_process_of_torchrun(tmp_path):
    """Nobody imports fusedmoe in the workers: torch does, through its entry point."""
    import importlib.metadata as metadata

    if not any(e.name == "fusedmoe" for e in metadata.entry_points(group="torch.backends")):
        pytest.skip("fusedmoe is not installed as a package here")
    script = tmp_path / "worker.py"
    script.write_text(
        "import os\n"
        "from llamafactory.v1.plugins.model_plugins.kernels import interface\n"
        "k = interface.default_kernels['npu_fused_moe']\n"
        "open(os.path.join(os.environ['OUT'], os.environ['RANK']), 'w').write(k.__module__)\n"
    )
    env = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)], check=True, env=env,
                   capture_output=True, timeout=120)  # fmt: skip
    for rank in "01":
        assert (tmp_path / rank).read_text().startswith("fusedmoe.")


def test_version():
    assert fusedmoe.__version__
