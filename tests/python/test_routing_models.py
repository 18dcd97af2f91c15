# SPDX-License-Identifier: Apache-2.0
"""Recorded and replayed routing in every MoE architecture of the installed transformers (v4 and v5): the same bits, and what drift does."""

import copy

import pytest
import torch
import transformers

import fusedmoe
import zoo
from common import V5, rel
from fusedmoe import routing

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(2))
REFUSED = {"phimoe"}  # sparsemixer: sampled while training, and a gradient of its own
VERSION = tuple(int(n) for n in transformers.__version__.split(".")[:2])
UNSEEN = {"phimoe": not V5, "aria": (5, 0) <= VERSION < (5, 22)}  # no module returns ids; experts that are given logits
OUT = {"nllb_moe": "an encoder-decoder with experts of two linears and a capacity", "switch_transformers": "as nllb_moe",
       "doge": "experts without weights to group"}  # fmt: skip
TRIED: dict[str, bool] = {}
KINDS = [kind for kind in zoo.architectures() if kind not in OUT]


def make(kind):
    TRIED[kind] = False
    try:
        model = zoo.tiny(kind)
        step(model)
        TRIED[kind] = True
    except Exception as problem:  # not ours: this version cannot make or run such a small one
        pytest.skip(f"transformers {transformers.__version__}: {kind}: {type(problem).__name__}: {problem}"[:300])
    return model


def step(model):
    """The last hidden states and every gradient (zeros where there is none)."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    out = model(input_ids=IDS)
    h = out[0]
    (h * torch.randn(h.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
    return h.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][n], g) for n, g in b[1].items())


def drifted(seen):
    """Other experts for every token, in the order of no score."""
    ids = seen.ids.long()
    for at, site in zip(seen.layers, seen.sites):
        if site.turn >= 0 and site.k < site.E:
            own = ids[:, at, : site.k]
            ids[:, at, : site.k] = torch.where(own < 0, own, (own + 1) % site.E)
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture(kind):
    model, after = make(kind), {}
    want = step(model)
    for how in ("own", "ours"):
        model = fusedmoe.apply(model, routers=True) if how == "ours" else model
        plain = step(model)
        if UNSEEN.get(kind):
            for context in (routing.record, lambda model: routing.replay(model, torch.zeros(18, 2, 2, dtype=torch.int64))):
                with pytest.raises((ValueError, NotImplementedError), match=r"layers\.0\.\w+(\.experts)?: no choice of experts"):
                    context(model)
            continue
        with routing.record(model) as seen:
            recorded = step(model)
        assert same(recorded, plain), "recording changes nothing"
        assert rel(recorded[0], want[0]) < 1e-4
        if kind in REFUSED:
            with pytest.raises(NotImplementedError, match=r"layers\.0\..*rule of its own"):
                routing.replay(model, seen.ids)
            continue
        with routing.replay(model, seen.ids):
            assert same(step(model), plain), "the same bits"
        other = drifted(seen)
        with routing.record(model) as again, routing.replay(model, other):
            after[how] = step(model)
        assert torch.equal(again.ids.long(), other), "these experts, in this order"
        assert rel(after[how][0], plain[0]) > 1e-4, "which are not those of the model itself"
    if after:  # autograd's gather in the model's own code, beside FMOE_REPLAY of the C library where that has the rule
        scale = max(float(g.norm()) for g in after["own"][1].values())
        worst = max(float((after["ours"][1][n] - g).norm()) / max(float(g.norm()), 1e-2 * scale) for n, g in after["own"][1].items())
        assert rel(after["ours"][0], after["own"][0]) < 1e-4 and worst < 1e-3
    routing.release(fusedmoe.unapply(model))
    assert not any("fmoe" in name for m in model.modules() for name in vars(m))
    assert same(step(model), want)


def test_no_architecture_is_left_out_by_chance():
    """Those that could not be made are few; each is named by a skip above."""
    if len(TRIED) < len(KINDS):
        pytest.skip("not all architectures were asked for")
    assert sum(TRIED.values()) >= len(KINDS) - 2, [kind for kind, made in TRIED.items() if not made]


RULES = {
    "mixtral": lambda logits, ids, gate: (w := logits.float().softmax(-1).gather(1, ids)) / w.sum(-1, keepdim=True),
    "gpt_oss": lambda logits, ids, gate: logits.gather(1, ids).softmax(-1),
    "deepseek_v3": lambda logits, ids, gate: (w := logits.float().sigmoid().gather(1, ids)) / (w.sum(-1, keepdim=True) + 1e-20) * 2.5,
    "deepseek_v2": lambda logits, ids, gate: logits.float().softmax(-1).gather(1, ids),
}  # fmt: skip


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("kind", [k for k in RULES if k in KINDS])
def test_weights_of_drifted_ids_are_gathered_from_live_scores(kind, applied):
    more = dict(topk_method="group_limited_greedy", routed_scaling_factor=1.0) if kind == "deepseek_v2" else {}
    if kind == "deepseek_v3":
        more = dict(routed_scaling_factor=2.5, norm_topk_prob=True)
    model = zoo.tiny(kind, **more)
    if applied:
        fusedmoe.apply(model, routers=True)
    found = routing.routers(model)
    name, (gate, site) = next(iter(found.items()))
    if not isinstance(gate, torch.nn.Module) or not hasattr(gate, "weight"):
        pytest.skip("in this version the block chooses, and no module returns weights")
    if kind.startswith("deepseek") and not applied:
        assert len(site.groups) == 1
    g = torch.Generator().manual_seed(1)
    x = torch.randn(40, 32, generator=g).requires_grad_()
    ids = torch.stack([torch.randperm(site.E, generator=g)[: site.k] for _ in range(40)])  # of groups that no score would open, too
    table = torch.full((40, 2, site.k), -1)
    table[:, 0], table[:, 1] = ids, ids
    with routing.replay(model, table):
        out = gate(x[None] if kind.startswith("deepseek") else x)
    chosen = next(t for t in out if not t.is_floating_point())
    weights = [t for t in out if t.is_floating_point() and t.shape == chosen.shape]
    if not weights:
        weights = [next(t for t in out if t.is_floating_point() and t.shape[-1] == site.E).gather(1, chosen)]  # scattered, in v4
    assert torch.equal(chosen, ids)
    bias = getattr(gate, "bias", None)
    want = RULES[kind](torch.nn.functional.linear(x, gate.weight, bias), ids, gate)
    assert rel(weights[0], want) < 1e-6
    dout = torch.randn(want.shape, generator=g)
    got = torch.autograd.grad(weights[0], [x, gate.weight], dout)
    exact = torch.autograd.grad(want, [x, gate.weight], dout)
    assert max(rel(a, b) for a, b in zip(got, exact)) < 2e-6 and min(float(t.norm()) for t in exact) > 0


@pytest.mark.parametrize("kind", [k for k in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss") if k in KINDS])
def test_controls(kind):
    """What is wrong with a table of ids is an error, or shows in the result."""
    model = zoo.tiny(kind)
    with routing.record(model) as seen:
        want = step(model)
    ids = seen.ids
    padded = ids.clone()
    padded[-2:] = 0
    with pytest.raises(ValueError, match=r"layer 0 \(layers\.0\..*\), token 16: ids \[0, 0\]: an expert twice"):
        routing.replay(model, padded)
    with routing.replay(model, ids.flip(1)):
        assert rel(step(model)[0], want[0]) > 1e-4, "layers swapped"
    with routing.replay(model, ids.flip(2)):
        columns = step(model)
    assert 0 <= rel(columns[0], want[0]) < 1e-5, "columns permuted: the same sum in another order"
    with routing.replay(copy.deepcopy(model), ids.flip(1)):
        assert same(step(model), want), "another model's replay"


@pytest.mark.skipif("deepseek_v4" not in KINDS, reason="this version has none")
def test_a_table_of_token_ids_is_compared():
    model = make("deepseek_v4")
    with torch.no_grad():
        for m in model.modules():
            if hasattr(m, "tid2eid"):
                m.tid2eid.copy_(torch.stack([torch.randperm(8)[:2] for _ in m.tid2eid]))
    with routing.record(model) as seen:
        want = step(model)
    table = next(site for site in seen.sites if site.output >= 0)
    ids = seen.ids.clone()
    ids[:, table.layer] = ids[:, table.layer].flip(1)  # in another order they are the same experts
    with routing.replay(model, ids):
        assert same(step(model), want)
    ids[4, table.layer] = (ids[4, table.layer] + 1) % 8
    message = rf"layer {table.layer} .*token 4: ids \[.*\], and its table of token ids has \["
    with pytest.raises(ValueError, match=message), routing.replay(model, ids):
        step(model)
