# SPDX-License-Identifier: Apache-2.0
"""Quantised weights in every form that a layer takes (stacks, stored [E,in,out], lists), in a compiled graph, and what cannot be done."""

import pytest
import torch

import fusedmoe
from fusedmoe import Flag
from fusedmoe.quant import FORMATS, QuantTensor
from fusedmoe.quant.formats import U4, Format

E, H, I, K = 4, 64, 32, 2


def draw(g, *shape, grad=True):
    return (torch.randn(shape, generator=g) * 0.1).bfloat16().requires_grad_(grad)


def asymmetric(w):
    """Groups of 32 with a tensor of zero points, as GPTQ and AWQ have them."""
    g, (e, n, k) = torch.Generator().manual_seed(5), w.shape
    codes = torch.randint(0, 256, (e, n, k // 2), generator=g, dtype=torch.uint8)
    scale, zeros = torch.rand(e, n, k // 32, generator=g) * 0.02, torch.randint(0, 16, (e, n, k // 32), generator=g, dtype=torch.uint8)
    return QuantTensor(codes, scale, Format("int4", U4, 0, 1, 32), w.shape, w.dtype, None, zeros)


def matrices(stack):
    """The experts of a stack as a list of matrices."""
    one = lambda t, e: None if t is None else t[e] if len(t) == len(stack.codes) else t
    parts = [[one(t, e) for t in (stack.codes, stack.scale, stack.scale2, stack.zeros)] for e in range(len(stack.codes))]
    return [QuantTensor(c, s, stack.format, stack.shape[1:], stack.dtype, s2 if s2 is None else s2.reshape(1), z) for c, s, s2, z in parts]


@pytest.mark.parametrize("form", ["stack", "transposed", "list", "mixed"])
@pytest.mark.parametrize("format", [*FORMATS, "zeros"])
def test_outputs_and_gradients_are_those_of_decoded_weights(form, format):
    g = torch.Generator().manual_seed(3)
    make = asymmetric if format == "zeros" else lambda w: QuantTensor.from_weights(w, format)
    gate, up, down = (make(draw(g, E, *s, grad=False)) for s in ((I, H), (I, H), (H, I)))
    if form == "list":
        coded = [*matrices(gate), *matrices(up), *matrices(down)]
        flags, plain = Flag.LIST, [t.dequantize() for t in coded]
    else:
        w1 = make(draw(g, E, 2 * I, H, grad=False))
        coded = [w1, down] if form != "mixed" else [w1, down.dequantize().requires_grad_()]
        if form == "transposed":
            coded = [t.turned() for t in coded]
        flags = Flag.TRANSPOSED if form == "transposed" else 0
        plain = [t.dequantize() if isinstance(t, QuantTensor) else t for t in coded]
        if form == "transposed":  # codes lie [E,out,in]: the bits are those of the layer on weights that do
            plain = [t.mT.contiguous() for t in plain]
    x, ids, p = draw(g, 9, H), torch.randint(0, E, (9, K), generator=g), torch.rand(9, K, generator=g).requires_grad_()
    lora = [(draw(g, E, 3, H), draw(g, E, 2 * I, 3), 2.0), (draw(g, E, 2, I), draw(g, E, H, 2))]
    wanted = [x, p, *(t for f in lora for t in f[:2]), *(t for t in plain if t.requires_grad)]
    results = []
    for w, form in ((coded, flags), (plain, flags & Flag.LIST)):
        out = fusedmoe.experts(x, ids, p, w, flags=int(form), lora=lora)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), wanted)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    with torch.no_grad():
        assert torch.equal(fusedmoe.experts(x, ids, p, coded, flags=int(flags), lora=lora), results[1][0])


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("format", [*FORMATS, "zeros"])
def test_a_grouped_matmul_is_that_of_decoded_weights(turned, format):
    """Codes [E,out,in], passed turned, and codes [E,in,out]; the weights that are decoded lie as the codes do."""
    g = torch.Generator().manual_seed(6)
    make = asymmetric if format == "zeros" else lambda w: QuantTensor.from_weights(w, format)
    w = make(draw(g, E, 96, 64, grad=False))
    coded, plain = (w.turned(), w.dequantize().mT) if turned else (w, w.dequantize())
    x, bias = draw(g, 12, coded.shape[1]), torch.randn(E, coded.shape[2], generator=g).requires_grad_()
    sizes, results = torch.tensor([3, 0, 1, 6]), []
    for weight in (coded, plain):
        y, z = fusedmoe.grouped_matmul(x, weight, sizes, bias), fusedmoe.GmmFunction.apply(x, weight, sizes)
        assert y.dtype == x.dtype and not y[10:].any()
        results.append([y, z, *torch.autograd.grad((y.float() * z).sum(), (x, bias))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_a_grouped_matmul_in_a_compiled_graph_and_its_errors():
    g = torch.Generator().manual_seed(7)
    w, x, sizes = QuantTensor.from_weights(draw(g, E, 32, 64, grad=False), "nf4"), draw(g, 8, 64), torch.tensor([2, 2, 2, 2])
    run = lambda x: fusedmoe.grouped_matmul(x * 2, w.turned(), sizes).relu()
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
    with pytest.raises(ValueError, match=r"x is \[8, 64\], weight is \[4, 32, 64\]"):
        fusedmoe.grouped_matmul(x, w, sizes)
    w.requires_grad_()
    with pytest.raises(ValueError, match="weight is quantised and requires a gradient"):
        fusedmoe.grouped_matmul(x, w.turned().requires_grad_(), sizes)


class Layer(torch.nn.Module):
    def __init__(self, format):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.w1, self.w2 = (
            torch.nn.Parameter(QuantTensor.from_weights(draw(g, E, *s, grad=False), format), False) for s in ((2 * I, H), (H, I))
        )
        self.a, self.b = (torch.nn.Parameter(draw(g, E, *s).detach().float()) for s in ((3, H), (2 * I, 3)))

    def forward(self, x, ids, p):
        return torch.relu(fusedmoe.experts(x * 2, ids, p, [self.w1, self.w2], lora=[(self.a, self.b, 0.5), None]) + 1)


@pytest.mark.parametrize("format", ["nf4", "int8", "mxfp4"])
def test_a_compiled_layer_stays_in_one_graph(format):
    layer, g = Layer(format), torch.Generator().manual_seed(2)
    x, ids, p = draw(g, 9, H), torch.randint(0, E, (9, K), generator=g), torch.rand(9, K, generator=g).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for f in (compiled, layer):
        out = f(x, ids, p)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, p, layer.a, layer.b])])
        with torch.no_grad():
            results[-1].append(f(x, ids, p))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_what_cannot_be_done_is_said():
    g = torch.Generator().manual_seed(4)
    w1, w2 = (QuantTensor.from_weights(draw(g, E, *s, grad=False), "nf4") for s in ((2 * I, H), (H, I)))
    x, ids, p = draw(g, 3, H), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(NotImplementedError, match="add_.*cannot be written to"):
        w1 += 1
    square = QuantTensor.from_weights(draw(g, E, H, H, grad=False), "nf4")  # 2I = H: shapes fit either way
    with pytest.raises(ValueError, match=r"TRANSPOSED, but w\[0\] holds its codes \[E, out, in\]"):
        fusedmoe.experts(x, ids, p, [square, w2.turned()], flags=int(Flag.TRANSPOSED))
    other = QuantTensor.from_weights(draw(g, E, I, H, grad=False), "int8")
    mixed = [*matrices(QuantTensor.from_weights(draw(g, E, I, H, grad=False), "nf4"))]
    with pytest.raises(ValueError, match="matrices of a list have one format"):
        fusedmoe.experts(x, ids, p, [*mixed[:3], matrices(other)[0], *mixed, *matrices(w2)], flags=int(Flag.LIST))


def test_operations_that_keep_it_quantised():
    w = QuantTensor.from_weights(draw(torch.Generator().manual_seed(6), E, 2 * I, H, grad=False), "mxfp4")
    for made, want in ((w[1:3], w.dequantize()[1:3]), (w.transpose(1, 2), w.dequantize().transpose(1, 2)), (w.clone(), w.dequantize())):
        assert isinstance(made, QuantTensor) and torch.equal(made.dequantize(), want)
    assert w[1:3].codes.data_ptr() == w.codes[1].data_ptr()
    assert torch.equal(w.mT[0:2].dequantize(), w.dequantize().mT[:2])
    assert torch.equal(w @ torch.ones(H, 1).bfloat16(), w.dequantize() @ torch.ones(H, 1).bfloat16())
