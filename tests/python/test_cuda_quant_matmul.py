# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul by quantised weights on a CUDA device: the same bits as by weights that were decoded on the CPU."""

import pytest
import torch

import fusedmoe
from cuda_common import needs_a_device
from fusedmoe.quant import FORMATS, QuantTensor

pytestmark = needs_a_device
HOPPER, ODD = (6, 512, 320), (5, 72, 36)  # E, in, out


def operands(format, sizes, dtype, turned):
    E, K, N = sizes
    g = torch.Generator().manual_seed(3)
    shape = (E, N, K) if turned else (E, K, N)
    coded = QuantTensor.from_weights((torch.randn(shape, generator=g) / K**0.5).to(dtype), format)
    plain = coded.dequantize().cuda()
    coded = coded.map(torch.Tensor.cuda)
    x = torch.randn(200, K, generator=g).to("cuda", dtype).requires_grad_()
    rows = torch.tensor([0, 90, 13, 1, 60, 20][:E], device="cuda")  # rows past them are of no group
    return x, rows, (coded.turned(), plain.transpose(1, 2)) if turned else (coded, plain)


def outcome(f, x, w, rows):
    y = f(x, w, rows)
    return y, *torch.autograd.grad(y, x, torch.sin(torch.arange(y.numel(), device="cuda")).view(y.shape).to(y.dtype))


@pytest.mark.parametrize("turned", [False, True], ids=["in_out", "out_in"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [HOPPER, ODD], ids=["hopper", "odd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_matmul_and_dx_are_those_by_decoded_weights(format, sizes, dtype, turned):
    x, rows, both = operands(format, sizes, dtype, turned)
    for f in (fusedmoe.grouped_matmul, fusedmoe.GmmFunction.apply):
        for got, want in zip(*[outcome(f, x, w, rows) for w in both], strict=True):
            assert got.is_cuda and torch.equal(got, want)


def test_a_quantised_weight_has_no_gradient():
    x, rows, (coded, _) = operands("nf4", HOPPER, torch.bfloat16, True)
    with pytest.raises(ValueError, match="quantised and requires a gradient"):
        fusedmoe.grouped_matmul(x, coded.requires_grad_(), rows)


@pytest.mark.parametrize("I", [128, 48])
def test_fp8_experts_of_transformers_are_run_as_they_came(I):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=I, num_experts=4, dtype=torch.bfloat16)
    experts = fp8.FP8Experts(config, block_size=(128, 128))
    for name, p in experts.named_parameters():
        p.data = torch.rand(p.shape) * 0.01 if "scale" in name else (torch.randn(p.shape) * 50).to(torch.float8_e4m3fn)
    w = [QuantTensor.from_fp8(getattr(experts, n), getattr(experts, f"{n}_scale_inv")).dequantize() for n in ("gate_up_proj", "down_proj")]
    model = torch.nn.ModuleList([experts]).cuda()
    before = {n: t.clone() for n, t in experts.state_dict().items()}
    fusedmoe.apply(model)
    assert isinstance(experts.gate_up_proj, QuantTensor) and experts.gate_up_proj.codes.is_cuda
    x = torch.randn(90, 256, device="cuda").bfloat16().requires_grad_()
    ids, p = torch.randint(0, 4, (90, 2), device="cuda"), torch.rand(90, 2, device="cuda")
    out, want = experts(x, ids, p), fusedmoe.experts(x, ids, p, [t.cuda() for t in w])
    assert torch.equal(out, want)
    dx, wanted = [torch.autograd.grad(t.float().sum(), x)[0].float() for t in (out, want)]
    assert (dx - wanted).norm() <= 0.01 * wanted.norm()  # test_cuda_quant.py: same()
    after = experts.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
