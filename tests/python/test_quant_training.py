# SPDX-License-Identifier: Apache-2.0
"""Adapters trained on quantised experts: Trainer, checkpointing, torch.compile, FSDP2 and DDP, with bitsandbytes' Linears beside them.
The oracle is the same model with decoded experts: the losses are the same bits."""

import copy
import os
import sys
from pathlib import Path

import pytest
import torch

import fusedmoe
from fusedmoe.quant import QuantTensor

sys.path.insert(0, str(Path(__file__).parent))
import processes

transformers = pytest.importorskip("transformers", minversion="5.6")
peft = pytest.importorskip("peft", minversion="0.18")
TOKENS = torch.arange(24).view(2, 12)
SIZES = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
             num_experts_per_tok=2, dtype=torch.bfloat16)  # fmt: skip
LORA = dict(r=4, target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])


def base(kind="qwen3_moe"):
    torch.manual_seed(0)
    if kind == "gpt_oss":
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(intermediate_size=64, num_local_experts=4, **SIZES)).bfloat16()
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(moe_intermediate_size=64, num_experts=4, **SIZES)).bfloat16()


def tuned(model, **more):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA | dict(init_lora_weights=False) | more))


def both(format="nf4", kind="qwen3_moe"):
    """A quantised model with adapters, and the same with decoded experts."""
    model = fusedmoe.quantize(base(kind), format)
    twin = fusedmoe.apply(fusedmoe.dequantize(copy.deepcopy(model)))
    return tuned(model), tuned(twin)


@pytest.fixture
def never_decoded(monkeypatch):
    def refuse(self, *_):
        raise AssertionError("a stack of weights was decoded")

    return lambda: monkeypatch.setattr(QuantTensor, "dequantize", refuse), monkeypatch.undo


def steps(model, n=3):
    """Losses, and the gradients of the last step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(n):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_checkpointing(kind, reentrant, never_decoded):
    model, twin = both("mxfp4" if kind == "gpt_oss" else "nf4", kind)
    if reentrant is not None:
        for m in (model, twin):
            m.gradient_checkpointing_enable({"use_reentrant": reentrant})
            m.enable_input_require_grads()
    never_decoded[0]()
    got = steps(model.train())
    never_decoded[1]()
    want = steps(twin.train())
    assert got[0] == want[0] and got[0][-1] < got[0][0]
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


def test_trainer(tmp_path, never_decoded):
    """The model that from_pretrained quantised, under transformers' Trainer; without adapters it is refused."""
    base().save_pretrained(tmp_path / "plain")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "plain", quantization_config=fusedmoe.QuantConfig("nf4"), dtype=torch.bfloat16)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 60, (8, 12), generator=torch.Generator().manual_seed(4))]
    how = dict(output_dir=tmp_path / "out", max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, use_cpu=True,
               report_to=[], save_strategy="steps", save_steps=3, disable_tqdm=True, gradient_checkpointing=True,
               gradient_checkpointing_kwargs={"use_reentrant": False})  # fmt: skip
    with pytest.raises(ValueError, match="quantized"):
        transformers.Trainer(model, transformers.TrainingArguments(**how), train_dataset=rows)
    twin = fusedmoe.apply(fusedmoe.dequantize(copy.deepcopy(model)))
    losses = []
    for m in (model, twin):
        m = tuned(m)
        trainer = transformers.Trainer(m, transformers.TrainingArguments(**how), train_dataset=rows)
        if m.get_base_model() is model:
            never_decoded[0]()
        trainer.train()
        never_decoded[1]()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 3
    saved = next((tmp_path / "out").glob("checkpoint-3/adapter_model.safetensors"))
    assert saved.stat().st_size < 200_000  # the adapters alone
    again = load(tmp_path / "plain", quantization_config=fusedmoe.QuantConfig("nf4"), dtype=torch.bfloat16)
    again = peft.PeftModel.from_pretrained(again, saved.parent).eval()
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, trainer.model.eval()(TOKENS).logits)


def test_bitsandbytes_for_the_other_linears(tmp_path, never_decoded):
    """4-bit experts of ours and 4-bit Linears of bitsandbytes: loaded, saved, found again, trained, dequantised."""
    bnb = pytest.importorskip("bitsandbytes")
    base().save_pretrained(tmp_path / "plain")
    linears = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "plain", quantization_config=fusedmoe.QuantConfig("nf4", linears=linears), dtype=torch.bfloat16).train()
    kinds = {type(m) for m in model.modules()}
    assert bnb.nn.Linear4bit in kinds and sum(isinstance(p, QuantTensor) for p in model.parameters()) == 4
    never_decoded[0]()
    want = model(TOKENS).logits  # in training: bitsandbytes' forward for inference rounds its scales for good
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype=torch.bfloat16).train()
    assert bnb.nn.Linear4bit in {type(m) for m in again.modules()} and torch.equal(again(TOKENS).logits, want)
    prepared = tuned(peft.prepare_model_for_kbit_training(again, gradient_checkpointing_kwargs={"use_reentrant": False}))
    with torch.autocast("cpu", torch.bfloat16):
        loss = prepared(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert sum(p.grad is not None for p in prepared.parameters()) == 16
    never_decoded[1]()
    plain = load(tmp_path / "saved", dtype=torch.bfloat16).dequantize()
    assert {type(m) for m in plain.modules()}.isdisjoint({bnb.nn.Linear4bit}) and not hasattr(plain.config, "quantization_config")
    assert (plain(TOKENS).logits - want).float().norm() < 0.01 * want.float().norm()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models(backend, never_decoded):
    """Forward and backward: the losses are those of the model that is not compiled. With inductor in make test-full: it takes a minute."""
    if backend == "inductor" and os.environ.get("FMOE_FULL", "0") == "0":
        pytest.skip("FMOE_FULL=1")
    model, _ = both()
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    never_decoded[0]()
    try:
        got = steps(compiled, 2)
    except Exception as problem:  # no compiler on this machine
        if backend == "inductor" and "compiler" in str(problem).lower():
            pytest.skip(str(problem).splitlines()[0])
        raise
    want = steps(twin, 2)
    assert all(abs(a - b) < 2e-2 for a, b in zip(got[0], want[0]))
    if backend == "aot_eager":
        assert got[0] == want[0]


# ---- several processes -----------------------------------------------------------------------------------------------------
def _refuse(self, *_):
    raise AssertionError("a stack of weights was decoded")


def fsdp2(rank, ranks, folder):
    """fully_shard: each process holds the codes of half of the experts; losses and gradients are those of one process."""
    from torch.distributed.fsdp import fully_shard

    for format in ("nf4", "int8", "fp8"):  # without a second scale, with one for the stack, in blocks
        model, _ = both(format)
        model, decode = model.bfloat16(), QuantTensor.dequantize
        twin = copy.deepcopy(model)
        QuantTensor.dequantize = _refuse
        try:
            for layer in model.base_model.model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            held = [p for n, p in model.named_parameters() if n.endswith("base_layer.down_proj")]
            assert len(held) == 2
            for p in held:
                assert isinstance(p._local_tensor, QuantTensor) and p._local_tensor.codes.shape[0] == 4 // ranks and p.shape[0] == 4
            got, want = steps(model), steps(twin)
        finally:
            QuantTensor.dequantize = decode
        assert got[0] == want[0], (got[0], want[0])
        for a, b in zip(got[1], want[1], strict=True):
            assert torch.equal(a.full_tensor(), b)


def ddp(rank, ranks, folder):
    """DistributedDataParallel compares the weights of its processes once, and computes with codes."""
    model, _ = both()
    model = model.bfloat16()
    twin, decode = copy.deepcopy(model), QuantTensor.dequantize
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    QuantTensor.dequantize = _refuse
    try:
        got, want = steps(wrapped), steps(twin)
    finally:
        QuantTensor.dequantize = decode
    assert got[0] == want[0], (got[0], want[0])
    if rank:  # others hold other weights
        next(p for p in twin.parameters() if isinstance(p, QuantTensor)).codes.zero_()
    try:
        torch.nn.parallel.DistributedDataParallel(twin)
        assert rank == 0
    except NotImplementedError as problem:
        assert rank and "cannot be written to" in str(problem)


def uneven(rank, ranks, folder):
    """Three experts over two processes are refused by name."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(moe_intermediate_size=64, num_experts=3, **SIZES)
    model = fusedmoe.quantize(transformers.Qwen3MoeForCausalLM(config).bfloat16(), "nf4")
    for layer in model.model.layers:
        fully_shard(layer)
    with pytest.raises(NotImplementedError, match="3 experts over 2 ranks"):
        model(input_ids=TOKENS)


CHECKS = [fsdp2, uneven, ddp]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.spawn(__file__, tmp_path_factory.mktemp("quant"), 2)


@pytest.mark.parametrize("check", [c.__name__ for c in CHECKS])
def test_two_processes(check, found):
    processes.passed(found, check)


if __name__ == "__main__":
    processes.serve(CHECKS, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:], last=ddp)
