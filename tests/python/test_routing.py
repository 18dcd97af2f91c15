# SPDX-License-Identifier: Apache-2.0
"""What a training loop does around a replay: recomputation, several batches, packing, padding, compilers, and ids that are wrong."""

import base64
import copy
import io
import threading

import pytest
import torch

import fusedmoe
from common import rel, tiny
from fusedmoe import routing

numpy = pytest.importorskip("numpy")
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(2))
T = IDS.numel()


def drawn(seed=0, tokens=T, layers=2, E=8, k=2):
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(tokens * layers)]).view(tokens, layers, k)


def grads(model):
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def forward(model, ids, tokens=IDS, **how):
    with routing.replay(model, ids, **how):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def step(model, ids, tokens=IDS, **how):
    """The backward is outside of the context."""
    loss = forward(model, ids, tokens, **how)
    loss.backward()
    return loss.detach(), grads(model)


def same(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][n], g) for n, g in b[1].items())


def near(a, b):
    scale = max(float(g.norm()) for g in b[1].values())
    return rel(a[0], b[0]) < 1e-6 and max(float((a[1][n] - g).norm()) for n, g in b[1].items()) < 1e-5 * scale


@pytest.fixture(params=["own", "ours"])
def model(request):
    made = tiny("Qwen3Moe").train()
    return fusedmoe.apply(made, routers=True) if request.param == "ours" else made


# ---- recomputation ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_uses_the_ids_of_its_forward(model, reentrant):
    model.enable_input_require_grads()  # a reentrant checkpoint has no gradient otherwise
    first, second = drawn(1), drawn(2)
    want = [step(model, ids) for ids in (first, second)]
    assert not torch.equal(want[0][0], want[1][0])
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    calls = []
    gate = model.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda *_: calls.append(torch._C._current_graph_task_id()))
    assert same(step(model, first), want[0])
    assert len([c for c in calls if c != -1]) >= 1, "it was recomputed"
    a, b = forward(model, first), forward(model, second)  # two batches, both pending
    with routing.replay(model, drawn(3)):  # and a third is open
        b.backward()
        assert same((b.detach(), grads(model)), want[1])
        a.backward()
    assert same((a.detach(), grads(model)), want[0])


def test_native_routing_after_a_replay_is_recomputed_natively(model):
    want = step_native(model)
    model.gradient_checkpointing_enable()
    pending = forward(model, drawn(1))
    assert same(step_native(model), want)
    pending.backward()
    with routing.replay(model, drawn(1)):
        model.gradient_checkpointing_disable()
        inside = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    model.zero_grad()
    inside.backward()
    assert not same((inside.detach(), grads(model)), want)


def step_native(model):
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), grads(model)


class Checkpointed(torch.nn.Module):
    """A layer that somebody else checkpoints."""

    def __init__(self, layer, how):
        super().__init__()
        self.layer, self.how = layer, how

    def __getattr__(self, name):
        return super().__getattr__(name) if name in ("layer", "how") else getattr(super().__getattr__("layer"), name)

    def forward(self, *args, **kwargs):
        return self.how(self.layer, *args, use_reentrant=False, **kwargs)


def test_a_checkpoint_that_is_not_known_is_an_error(model):
    want = step(model, drawn(1))
    for how in (torch.utils.checkpoint.checkpoint, routing.checkpoint):
        other = copy.deepcopy(model)
        other.model.layers[0] = Checkpointed(other.model.layers[0], how)
        loss = forward(other, drawn(1))
        if how is routing.checkpoint:
            loss.backward()
            assert torch.equal(loss, want[0]) and torch.equal(other.lm_head.weight.grad, want[1]["lm_head.weight"])
        else:
            with pytest.raises(RuntimeError, match=r"layers\.0\..*recomputed in backward by a checkpoint that does not know"):
                loss.backward()


def test_torchs_checkpoint_wrapper(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper

    want = step(model, drawn(1))
    kind = type(model.model.layers[0])
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda m: type(m) is kind)
    got = step(model, drawn(1))
    got = got[0], {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in got[1].items()}
    assert same(got, want)


def test_record_ignores_recomputation(model):
    model.gradient_checkpointing_enable()
    with routing.record(model) as seen:
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(seen.calls) == 1 and seen.ids.shape == (T, 2, 2) and seen.ids.dtype == torch.int16


# ---- contexts ---------------------------------------------------------------------------------------------------------
def test_contexts_nest_and_end(model):
    plain = step_native(model)
    outer, inner = step(model, drawn(1)), step(model, drawn(2))
    with routing.replay(model, drawn(1)) as first:
        assert torch.equal(forward(model, drawn(2)).detach(), inner[0])
        assert torch.equal(model(input_ids=IDS, labels=IDS).loss.detach(), outer[0])
        with first:  # again
            assert torch.equal(model(input_ids=IDS, labels=IDS).loss.detach(), outer[0])
    with pytest.raises(ZeroDivisionError), routing.replay(model, drawn(1)):
        raise ZeroDivisionError
    model.zero_grad()
    assert same(step_native(model), plain)


def test_a_replay_is_of_its_model_and_thread(model):
    other = copy.deepcopy(model)
    want = other(input_ids=IDS, labels=IDS).loss.detach()
    results = []
    with routing.replay(model, drawn(1)):
        assert torch.equal(other(input_ids=IDS, labels=IDS).loss.detach(), want)
        thread = threading.Thread(target=lambda: results.append(model(input_ids=IDS, labels=IDS).loss.detach()))
        thread.start()
        thread.join()
    assert torch.equal(results[0], want)


def test_copies_are_free_of_a_replay(model):
    import pickle

    want = model(input_ids=IDS, labels=IDS).loss.detach()
    with routing.replay(model, drawn(1)):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(input_ids=IDS, labels=IDS).loss.detach(), want)
            with routing.record(other) as seen, routing.replay(other, drawn(2)):
                other(input_ids=IDS)
            assert torch.equal(seen.ids.long(), drawn(2))


def test_an_error_inside_a_router_leaves_nothing_open(model):
    gate = model.model.layers[0].mlp.gate
    handle = gate.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), routing.replay(model, drawn(1)):
        model(input_ids=IDS)
    handle.remove()
    assert torch._C._len_torch_function_stack() == 0
    assert torch.equal(forward(model, drawn(1)), forward(model, drawn(1)))


@pytest.mark.parametrize("dynamic", [None])
@pytest.mark.parametrize("routers", [False, True])
def test_compile(dynamic, routers):
    model = fusedmoe.apply(tiny("Qwen3Moe"), routers=routers)
    want = [step(model, drawn(seed)) for seed in range(4)]
    native = step_native(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    torch._dynamo.reset()
    first = [step(compiled, drawn(seed)) for seed in range(2)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        rest = [step(compiled, drawn(seed)) for seed in range(2, 4)]
    for (loss, found), exact in zip(first + rest, want):
        assert near((loss, {n.replace("_orig_mod.", ""): g for n, g in found.items()}), exact)
    loss, found = step_native(compiled)
    assert near((loss, {n.replace("_orig_mod.", ""): g for n, g in found.items()}), native)
    with routing.record(compiled) as seen, routing.replay(compiled, drawn(3)):
        compiled(input_ids=IDS)
    assert torch.equal(seen.ids.long(), drawn(3))


def test_the_auxiliary_loss_is_of_live_logits():
    model = tiny("Qwen3Moe", output_router_logits=True)
    want = model(input_ids=IDS, labels=IDS).router_logits[0]
    with routing.replay(model, drawn(1)):
        out = model(input_ids=IDS, labels=IDS)
    assert torch.equal(out.router_logits[0], want) and out.aux_loss.requires_grad


# ---- what ids may be ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64, numpy.uint8, numpy.uint16, numpy.int32])
def test_integers_of_any_kind(kind):
    model, ids = tiny("Qwen3Moe"), drawn(1)
    given = ids.to(kind) if isinstance(kind, torch.dtype) else ids.numpy().astype(kind)
    with routing.record(model) as seen:
        got = forward(model, given)
    assert torch.equal(got, forward(model, ids)) and torch.equal(seen.ids.long(), ids)


@pytest.mark.parametrize("change", [
    lambda ids: ids.to(torch.uint64), lambda ids: ids.numpy().astype("uint64"), lambda ids: ids.numpy().astype(">i4"),
    lambda ids: ids.numpy()[::-1].copy()[::-1], lambda ids: ids.numpy()[..., ::-1].copy()[..., ::-1], lambda ids: ids.tolist(),
])  # fmt: skip
def test_arrays_as_they_come(model, change):
    """Unsigned, in another byte order, with negative strides, or nested lists."""
    assert same(step(model, change(drawn())), step(model, drawn()))


def test_lengths_and_masks_as_they_come():
    ids = drawn()
    sequences, half = [ids[:11], ids[11:]], T // 2
    for lengths in ([half, half], torch.tensor([half, half]), numpy.array([half, half])):
        assert torch.equal(routing.place(sequences, lengths=lengths), ids)
    for mask in (torch.ones(2, 11), numpy.ones((2, 11), dtype=bool), [[1] * 11] * 2):
        assert torch.equal(routing.place(sequences, mask=mask), ids)
    with pytest.raises(TypeError, match="place: lengths are float32, expected integers"):
        routing.place(sequences, lengths=[11.5, 11.0])


def test_what_are_no_ids(model):
    for wrong, kind, message in ((None, TypeError, r"replay: ids are None \(NoneType\)"), ("abc", TypeError, r"ids are 'abc' \(str\)"),
                                 (drawn().to("meta"), ValueError, "replay: ids are on meta")):  # fmt: skip
        with pytest.raises(kind, match=message):
            routing.replay(model, wrong)
    with pytest.raises(TypeError, match=r"routing: model is a str \('m'\), expected a torch.nn.Module"):
        routing.record("m")
    with pytest.raises(ValueError, match="layers is 2.0 and k is 2.0, expected whole numbers"):
        routing.from_sglang(drawn(), 2.0, 2.0)
    with routing.record(model) as seen, torch.no_grad():
        model(IDS)
    for batch in (0, -1, 5):
        with pytest.raises(ValueError, match=f"sequences: batch is {batch}, and the runs were of .22. tokens"):
            seen.sequences(batch)


def test_rows_that_are_missing_are_routed_natively(model):
    with routing.record(model) as seen:
        native = step_native(model)
    own, ids = seen.ids.long(), drawn(1)
    for rows in (torch.ones(T, dtype=torch.bool), torch.arange(T) % 3 == 0, torch.zeros(T, dtype=torch.bool)):
        holes = ids.clone()
        holes[rows] = -1
        with routing.record(model) as got:
            result = step(model, holes)
        assert torch.equal(got.ids[~rows].long(), ids[~rows])
        assert torch.equal(got.ids[rows, 0].long(), own[rows, 0])  # of the first layer: later ones see other hidden states
        if rows.all():
            assert same(result, native)
    holes[0] = -1
    with pytest.raises(ValueError, match=r'layer 0 .*token 0: ids \[-1, -1\]: no ids, and missing="error"'):
        routing.replay(model, holes, missing="error")


def test_groups_stay_open_for_rows_that_are_missing():
    model = tiny("DeepseekV2", topk_method="group_limited_greedy", n_group=4, topk_group=2, first_k_dense_replace=0).eval()
    try:
        model(input_ids=IDS)
    except AttributeError as problem:
        pytest.skip(f"this version of the model cannot run by itself: {problem}")  # 5.6
    with routing.record(model) as seen:
        want = model(input_ids=IDS).logits
    ids = seen.ids.clone()
    ids[::2] = -1
    with routing.record(model) as again, routing.replay(model, ids):
        assert torch.equal(model(input_ids=IDS).logits, want)
    assert torch.equal(again.ids, seen.ids)


def test_sequences_of_a_packed_and_of_a_padded_batch(model):
    lengths, ids = [5, 1, 8], drawn(1, 14)
    sequences = list(ids.split(lengths))
    packed = torch.arange(14).view(1, -1) + 3
    want = step(model, ids, packed)
    assert same(step(model, sequences, packed, lengths=lengths), want)
    short = [t[:-1] for t in sequences]  # as engines give them: none for the token that was sampled last
    holes = ids.clone()
    holes[torch.tensor(lengths).cumsum(0) - 1] = -1
    assert same(step(model, short, packed, lengths=lengths), step(model, holes, packed))
    for left in (False, True):
        mask = torch.zeros(3, 9, dtype=torch.long)
        for i, n in enumerate(lengths):
            mask[i, -n:] = 1
        mask = mask if left else mask.flip(1)
        tokens, table = torch.zeros(3, 9, dtype=torch.long), torch.full((3, 9, 2, 2), -1)
        tokens[mask.bool()], table[mask.bool()] = packed[0], ids
        assert same(step(model, sequences, tokens, mask=mask), step(model, table, tokens))
    with pytest.raises(ValueError, match="sequence 1 has 2 rows and 1 tokens"):
        routing.replay(model, [ids[:5], ids[:2], ids[:8]], lengths=lengths)
    with pytest.raises(ValueError, match="2 sequences, and lengths is of 3"):
        routing.replay(model, sequences[:2], lengths=lengths)
    with pytest.raises(ValueError, match="`lengths`.*or `mask`"):
        routing.replay(model, sequences)


def test_layers_are_the_decoders():
    """A dense first layer has a row in what vLLM gives (zeros), or none."""
    model = tiny("DeepseekV3", first_k_dense_replace=1, num_hidden_layers=3)
    with routing.record(model) as seen:
        model(input_ids=IDS)
    assert seen.ids.shape == (T, 3, 2) and (seen.ids[:, 0] == -1).all() and (seen.ids[:, 1:] >= 0).all()
    ids = drawn(1, layers=3)
    want = forward(model, ids)
    zeros = ids.clone()
    zeros[:, 0] = 0
    assert torch.equal(forward(model, zeros), want) and torch.equal(forward(model, ids[:, 1:]), want)
    with pytest.raises(ValueError, match="ids are of 4 layers, and the model has 3, 2 of them with a router"):
        routing.replay(model, drawn(1, layers=4))
    with pytest.raises(ValueError, match=r"layer 2 \(model\.layers\.2\..*\), token 0"):
        bad = ids.clone()
        bad[0, 2] = 0
        routing.replay(model, bad)


@pytest.mark.parametrize("family", ["Llama4", "Qwen3Moe"])
def test_one_expert_a_token(family):
    model = tiny(family, num_experts_per_tok=1)
    ids = drawn(1, k=1)
    with routing.record(model) as seen:
        loss = forward(model, ids)
    assert torch.equal(seen.ids.long(), ids)
    assert not torch.equal(loss, model(input_ids=IDS, labels=IDS).loss)


def wrong(ids, *at, to):
    ids = ids.clone()
    ids[at] = to
    return ids


@pytest.mark.parametrize("change, message", [
    (lambda ids: wrong(ids, 7, 1, 1, to=-1), r"layer 1 \(model\.layers\.1\.mlp.*\), token 7: ids \[\d, -1\]: expected experts 0 to 7"),
    (lambda ids: wrong(ids, 3, 0, 0, to=8), r"layer 0 \(model\.layers\.0\.mlp(\.gate)?\), token 3: ids \[8, \d\]: expected experts 0 to 7"),
    (lambda ids: wrong(ids, 3, 0, 1, to=-2), r"layer 0 .*token 3: ids \[\d, -2\]: expected experts 0 to 7"),
    (lambda ids: wrong(ids, 5, 1, to=4), r"layer 1 .*token 5: ids \[4, 4\]: an expert twice"),
    (lambda ids: torch.cat((ids, ids[..., :1]), 2), r"ids have 3 columns, and layer 0 \(model\.layers\.0\.mlp.*\) chooses 2 experts"),
    (lambda ids: ids[..., :1], r"ids have 1 columns, and layer 0 .* chooses 2 experts"),
    (lambda ids: ids[0], r"ids are \[2, 2\], expected \[T, L, k\]"),
    (lambda ids: ids.float(), "ids are float32, expected integers"),
    (lambda ids: ids > 3, "ids are bool, expected integers"),
    (lambda ids: ids[:, :1].expand(-1, 5, -1), "ids are of 5 layers, and the model has 2, 2 of them with a router"),
])  # fmt: skip
def test_ids_that_are_wrong(model, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        routing.replay(model, change(drawn(1)))


def test_another_number_of_tokens(model):
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp(\.gate)? routes {T} tokens, and the ids are of {T - 1}"):
        forward(model, drawn(1)[:-1])
    assert step(model, drawn(1))


def test_routers_in_two_towers():
    both = torch.nn.ModuleDict(dict(one=tiny("Qwen3Moe"), two=tiny("Qwen3Moe")))
    with pytest.raises(ValueError, match=r"routers in 'one\.model\.layers', 'two\.model\.layers'"):
        routing.record(both)
    with routing.record(both.two) as seen:
        both.one(input_ids=IDS)
        both.two(input_ids=IDS)
    assert seen.ids.shape == (T, 2, 2)


def test_models_without_a_router():
    with pytest.raises(ValueError, match="Linear has no router"):
        routing.record(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="DataParallel"):
        routing.record(torch.nn.DataParallel(tiny("Qwen3Moe")))


# ---- engines ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [numpy.uint8, numpy.uint16, numpy.int32])
def test_what_vllm_gives(kind):
    ids = drawn(1, 9).numpy().astype(kind)
    file = io.BytesIO()
    numpy.save(file, ids)
    text = base64.b64encode(file.getvalue()).decode()
    for given in (ids, text, file.getvalue(), torch.from_numpy(ids.astype(numpy.int32))):
        assert torch.equal(routing.from_vllm(given).long(), drawn(1, 9))
        full = routing.from_vllm(given, tokens=10)
        assert torch.equal(full[:9].long(), drawn(1, 9)) and (full[9] == -1).all()
    for bad, message in ((b"\x93NUMPY", "no .npy file"), ("!", "not base64"), (ids[0], "expected three dimensions"), (ids / 2, "integers")):
        with pytest.raises((ValueError, TypeError), match=message):
            routing.from_vllm(bad)
    with pytest.raises(ValueError, match="9 rows, and the sequence has 12 tokens"):
        routing.from_vllm(ids, tokens=12)
    pickled = io.BytesIO()
    numpy.save(pickled, numpy.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="no .npy file"):
        routing.from_vllm(pickled.getvalue())


def test_what_sglang_gives():
    ids = drawn(1, 9).to(torch.int32)
    text = base64.b64encode(ids.numpy().tobytes()).decode()
    for given in (text, ids.numpy().tobytes(), ids, ids.flatten(), ids.numpy()):
        assert torch.equal(routing.from_sglang(given, 2, 2), ids)
    assert (routing.from_sglang(text, 2, 2, tokens=10)[9] == -1).all()
    assert routing.from_sglang(b"", 2, 2).shape == (0, 2, 2)
    for bad, message in ((text[:-4], "whole number|no rows"), (ids[:, :1], "no rows"), (ids.flatten()[:-1], "no rows")):
        with pytest.raises(ValueError, match=message):
            routing.from_sglang(bad, 2, 2)
    model = tiny("Qwen3Moe")
    tokens = IDS.view(1, -1)
    with routing.record(model) as seen:
        forward(model, routing.from_sglang(drawn(1, T - 1).to(torch.int32).numpy().tobytes(), 2, 2, tokens=T), tokens)
    assert torch.equal(seen.ids[:-1].long(), drawn(1, T - 1))


def test_generate_is_recorded_and_replayed():
    """Left padding, as for decoding: what the rollout chose, token by token, is what the trainer chooses at once."""
    model = fusedmoe.apply(tiny("Qwen3Moe")).eval()
    prompts, mask = IDS[:, :6].clone(), torch.ones(2, 6, dtype=torch.long)
    mask[1, :3] = 0
    with routing.record(model) as seen:
        tokens = model.generate(prompts, attention_mask=mask, max_new_tokens=5, do_sample=True, min_new_tokens=5)
    ids = seen.sequences(2)
    assert ids.shape == (2, 10, 2, 2) and tokens.shape == (2, 11)
    ids = torch.cat((ids, ids.new_full((2, 1, 2, 2), -1)), 1)
    mask = torch.cat((mask, mask.new_ones(2, 5)), 1)
    with routing.record(model) as again, routing.replay(model, ids):
        model(input_ids=tokens, attention_mask=mask)
    assert torch.equal(again.ids.view(2, 11, 2, 2)[:, :10], ids[:, :10])
    with pytest.raises(RuntimeError, match="ran 5 times"):
        seen.ids  # noqa: B018
    with pytest.raises(ValueError, match="batch is 5"):
        seen.sequences(5)
