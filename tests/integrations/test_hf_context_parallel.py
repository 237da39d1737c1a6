"""``context_parallel``: a Trainer and an accelerate loop on 2 and 4 processes take the steps that one process takes on the same batches.

Models are float64, but transformers takes the loss of float32 logits, as one process does: what differs are the few logits that round
to another float32, so that weights agree to 1e-9 and logged losses to 1e-6.
"""

import contextlib
import copy
import functools
import gc
import itertools
import os
import re
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dilated_attention.distributed.sharding.layout import unshard_sequence
from dilated_attention.integrations.huggingface import configure, context_parallel, register, shard_inputs
from tests.helpers.pool import patience, pool_of
from tests.helpers.scripts import needs_pins
from tests.integrations.test_huggingface import (  # noqa: F401  the fixture is used by every test
    DECODER,
    PINNED,
    RELEASE,
    bert,
    gpt_oss,
    llama,
    model_of,
    registered,
    tokens,
)

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(RELEASE < PINNED, reason="context_parallel refuses older releases of transformers"),
]

# frequencies for rows longer than 40 positions, whose end not every process has
LONG = {"original_max_position_embeddings": 40, "max_position_embeddings": 80}
HALF = DECODER["hidden_size"] // DECODER["num_attention_heads"] // 2
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * HALF, "long_factor": [4.0] * HALF}
MODELS = {
    "llama": llama,
    "gpt_oss": gpt_oss,
    "one layer": functools.partial(llama, num_hidden_layers=1),
    "longrope": functools.partial(model_of, "Phi3", {**LONG, "rope_parameters": LONGROPE | LONG}),
    "complex": functools.partial(
        model_of,
        "DeepseekV2",
        {"max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
        | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}
        | {"first_k_dense_replace": 2, "num_key_value_heads": 4},
    ),
    "dynamic": functools.partial(
        llama, max_position_embeddings=20, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    ),
}
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": 3,
    "gradient_accumulation_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "include_num_input_tokens_seen": "all",
}
FSDP = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
TOLERANCE = 1e-9


@contextlib.contextmanager
def launched(rank: int, world: int, as_gpu: bool = False) -> Iterator[None]:
    """What torchrun tells a process, and accelerate's singletons as in a new one.

    Args:
        as_gpu: accelerate takes the process for one with a GPU, which is when it shards parameters; its device is the CPU all the same.
    """
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before = dict(os.environ)
    reset()
    if world > 1:
        # torch.distributed is initialised; the address is looked for and not used
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    patch = pytest.MonkeyPatch()
    if as_gpu:
        state = accelerate.state
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        patch.setattr(state.PartialState, "_prepare_backend", lambda *_, **__: ("gloo", state.DistributedType.MULTI_GPU))
    try:
        yield
    finally:
        patch.undo()
        os.environ.clear()
        os.environ.update(before)
        reset()


def reset() -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


class Texts(Dataset):  # type: ignore[type-arg]
    """Samples whose targets are many, few, and none in some process's part."""

    def __init__(self, count: int, length: int, kind: str = "plain") -> None:
        ids = tokens(count, length)
        self.rows = []
        for index, row in enumerate(ids):
            labels = row.clone()
            labels[: 5 * (index % 3)] = -100
            if index % 2:
                # the last part has none
                labels[length // 3 :] = -100
            sample = {"input_ids": row, "labels": labels}
            if kind == "padded":
                sample["attention_mask"] = torch.arange(length).ge(length - 7 * (index % 2) - 1).logical_not().long()
            if kind == "packed":
                cuts = [0, 5 + index % 4, 30, length]
                sample["position_ids"] = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)])
            self.rows.append(sample)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples one after the other, without a length."""

    def __init__(self, rows: Texts) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.rows.rows)


def trained(rank: int, world: int, folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """Weights, logs and more of a Trainer; without a size it is plain transformers'."""
    size, batch, arguments = case.get("size"), case.get("batch", 1), case.get("args", {})
    with launched(rank, world, as_gpu="fsdp" in arguments):
        if "register" in case:
            register(**case["register"])
        model = MODELS[case.get("model", "llama")]()
        model.config._attn_implementation = original = case.get("attention", model.config._attn_implementation)
        batches = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
        args = transformers.TrainingArguments(output_dir=folder, **{**ARGUMENTS, **batches, **arguments})
        length, kind = case.get("length", 49), case.get("kind", "plain")
        data: Any = Texts(12, length, kind)
        if case.get("is_stream"):
            data = Stream(data)
        held_out = Texts(case.get("evaluated", 4), length, kind)
        for row in [*data.rows, *held_out.rows] if size and case.get("has_ones") else ():
            # from which transformers alone does not find documents
            row["attention_mask"] = torch.ones_like(row["input_ids"])
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=held_out)
        place: dict[str, Any] = {"size": size}
        if size and case.get("is_strided"):
            # processes 0 and 2 share a sequence, and 1 and 3
            place = {"mesh": init_device_mesh("cpu", (size, world // size), mesh_dim_names=("cp", "dp"))["cp"]}
        handle = context_parallel(trainer, **place, timeout=patience(), **case.get("options", {})) if size else None
        trainer.train(resume_from_checkpoint=case.get("resume"))
        found: dict[str, Any] = {"logs": [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]}
        found |= {"eval": trainer.evaluate()["eval_loss"], "batch": trainer.get_total_train_batch_size(args)}
        found |= {"tokens": trainer.state.num_input_tokens_seen, "flos": trainer.state.total_flos}
        found["is_sharded"] = hasattr(next(model.parameters()), "full_tensor")
        if case.get("predict"):
            found["logits"] = torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions)
        if case.get("save"):
            trainer.save_model(case["save"])
        if case.get("generate"):
            found["written"] = written(model)
        if handle is not None:
            handle.remove()
        assert model.config._attn_implementation == original
        found["weights"] = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}
        return found


def written(model: Any) -> list[torch.Tensor]:
    """Tokens from a dynamic and from a static cache."""
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return [model.generate(tokens(1, 9), **options, **more) for more in ({}, {"cache_implementation": "static", "disable_compile": True})]


def check(found: dict[str, Any], expected: dict[str, Any], rounding: float = TOLERANCE) -> None:
    assert found["weights"].keys() == expected["weights"].keys()
    errors = {name: float((found["weights"][name] - weight).abs().max()) for name, weight in expected["weights"].items()}
    assert max(errors.values()) < rounding, errors
    # of float32 logits, and divided by the number of targets in float32
    assert torch.tensor(found["logs"]).allclose(torch.tensor(expected["logs"]), rtol=1e-6, atol=0), (found["logs"], expected["logs"])
    assert found["eval"] == pytest.approx(expected["eval"], rel=1e-6)
    assert (found["batch"], found["tokens"], found["flos"]) == (expected["batch"], expected["tokens"], expected["flos"])


CASES: dict[str, dict[str, Any]] = {
    "data parallel too, an epoch, of no neighbours": {
        "size": 2,
        "world": 4,
        "is_strided": True,
        "args": {"max_steps": -1, "num_train_epochs": 1},
    },
    "more processes than heads of keys": {"size": 4, "length": 21, "options": {"layout": "striped"}},
    "padding": {"size": 2, "batch": 2, "kind": "padded", "options": {"layout": "contiguous"}},
    "packed documents, a mask of ones in the shared batches": {"size": 2, "kind": "packed", "has_ones": True},
    "longrope": {"size": 2, "model": "longrope", "rounding": 1e-6},
    "complex": {"size": 2, "model": "complex", "rounding": 1e-6},
    "dynamic": {"size": 3, "model": "dynamic", "kind": "padded", "batch": 2, "rounding": 1e-6},
    "windows and sinks": {"size": 2, "model": "gpt_oss", "rounding": 1e-6},
    "dilated": {"size": 2, "attention": "dilated", "register": {"segment_lengths": [8, 32], "dilation_rates": [1, 3]}},
    "checkpoints": {
        "size": 2,
        "args": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
    },
    "compiled": {"size": 2, "model": "one layer", "kind": "packed", "args": {"torch_compile": True, "torch_compile_backend": "eager"}},
    "fsdp": {"size": 2, "world": 4, "args": {"use_cpu": False, "fsdp": True, "fsdp_config": FSDP}},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_pins if "checkpoints" in name else ()) for name in CASES])
def test_a_trainer_takes_the_steps_of_one_process(name: str, tmp_path: Path) -> None:
    case = {**CASES[name]}
    world = case.pop("world", case["size"])
    groups, rounding = world // case["size"], case.pop("rounding", TOLERANCE)
    alone = {key: value for key, value in case.items() if key not in ("size", "options", "args")}
    expected = trained(0, 1, str(tmp_path / "alone"), {**alone, "batch": case.get("batch", 1) * groups})
    assert expected["logs"][0] != expected["logs"][2], "nothing was learned"
    for found in pool_of(world).run(trained, str(tmp_path / "shared"), {**case, "save": str(tmp_path / "saved")}, timeout=120):
        check(found, expected, rounding)
        assert found["is_sharded"] == (name == "fsdp")
    if "register" not in case:
        saved = type(MODELS[case.get("model", "llama")]()).from_pretrained(tmp_path / "saved", dtype=torch.float64)
        assert max(float((saved.get_parameter(name) - weight).abs().max()) for name, weight in expected["weights"].items()) < rounding


def test_a_stream_and_metrics_are_those_of_the_data_parallel_processes(tmp_path: Path) -> None:
    """Three samples are evaluated, so that the last batch of two processes has one more, which metrics must not see."""
    case = {"is_stream": True, "predict": True, "evaluated": 3}
    expected, _ = pool_of(2).run(trained, str(tmp_path / "plain"), {**case})
    for found in pool_of(4).run(trained, str(tmp_path / "shared"), {**case, "size": 2}, timeout=120):
        check(found, expected)
        assert found["logits"].shape == (3, 49, 61) and (found["logits"] - expected["logits"]).abs().max() < 1e-10


def test_a_checkpoint_is_a_plain_one_and_training_goes_on_from_it(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    case = {"size": 2, "world": 4, "args": saving, "save": str(tmp_path / "saved"), "generate": True}
    expected = trained(0, 1, str(tmp_path / "alone"), {"batch": 2, "generate": True})
    for found in pool_of(4).run(trained, str(tmp_path / "shared"), case, timeout=120):
        check(found, expected)
        assert all(torch.equal(one, other) for one, other in zip(found["written"], expected["written"], strict=True))
    resumed = {**case, "resume": str(tmp_path / "shared" / "checkpoint-2")}
    for again in pool_of(4).run(trained, str(tmp_path / "again"), resumed, timeout=120):
        check(again, expected)
    # plain transformers', to which this library is not known
    for folder in (tmp_path / "saved", tmp_path / "shared" / "checkpoint-3"):
        config = (folder / "config.json").read_text()
        assert "attn" not in config.replace("attention_", "") and "dilated" not in config


def test_configs_name_the_model_s_own_attention() -> None:
    dense, dilated = llama(), llama()
    plain = dense.config.to_dict()
    with attached(dense):
        assert dense.config._attn_implementation.startswith("context_parallel") and dense.config.to_dict() == plain
    assert dense.config._attn_implementation == "sdpa"
    dilated.set_attn_implementation("dilated")
    configure(dilated, segment_lengths=[16, 32], dilation_rates=[1, 2], layout="striped")
    saved = dilated.config.to_dict()
    assert saved["attn_implementation"] == "dilated"
    expected = dilated(tokens(), labels=tokens()).loss
    with attached(dilated) as handle:
        # a layout of the config is not overruled
        assert handle.layout == "striped" and dilated.config.to_dict() == saved
        with pytest.raises(ValueError, match=r"expected configure before, or after remove\(\)"):
            configure(dilated)
        assert dilated(tokens(), labels=tokens()).loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(ValueError, match="layout is 'zigzag', and the model's config says 'striped'"), attached(dilated, layout="zigzag"):
        pass


# ---- a loop of one's own


def looped(rank: int, world: int, size: int | None, batch: int) -> dict[str, Any]:
    """A loop with accelerate: LoRA's weights, learning rates, losses, logits and tokens."""
    peft = pytest.importorskip("peft")
    with launched(rank, world):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(3)
        model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=16)
        # equal numbers of targets, since this loop takes the mean of its batches' losses
        rows = [{"input_ids": row, "labels": row} for row in tokens(8, 31)]
        handle = context_parallel(accelerator, model, size=size, timeout=patience()) if size else None
        if handle is not None:
            with pytest.raises(TypeError, match=r"expected remove\(\) before"):
                copy.deepcopy(model)
        wrapped, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, DataLoader(rows, batch_size=batch))
        losses, rates = [], []
        wrapped.train()
        for given in loader:
            with accelerator.accumulate(wrapped):
                outputs = wrapped(**given)
                accelerator.backward(outputs.loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                rates.append(scheduler.get_last_lr()[0])
                losses.append(accelerator.gather_for_metrics(outputs.loss.detach()).mean().item())
        wrapped.eval()
        with torch.no_grad():
            outputs = wrapped(**given)
            logits = outputs.logits if handle is None else unshard_sequence(handle.group, [outputs.logits], [1], layout=handle.layout)[0]
        gathered = accelerator.gather_for_metrics(logits)
        if handle is not None:
            for _ in accelerator.prepare(DataLoader(Stream(Texts(8, 31)), batch_size=1)):
                with pytest.raises(ValueError, match="without a length in 2 groups"):
                    accelerator.gather_for_metrics(torch.zeros(1))
                break
        first = model.generate(input_ids=tokens(1, 9), max_new_tokens=5, do_sample=False, pad_token_id=0)
        if handle is not None:
            handle.remove()
        weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        return {"weights": weights, "losses": losses, "logits": gathered, "written": first, "rates": rates}


def test_a_loop_with_accelerate_and_lora_takes_the_steps_of_the_data_parallel_processes() -> None:
    expected, _ = pool_of(2).run(looped, None, 1)
    assert expected["losses"][0] != expected["losses"][-1] and len(expected["weights"]) == 8 and len(set(expected["rates"])) > 1
    for found in pool_of(4).run(looped, 2, 1, timeout=120):
        assert max(float((found["weights"][name] - w).abs().max()) for name, w in expected["weights"].items()) < TOLERANCE
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6) and found["rates"] == expected["rates"]
        assert (found["logits"] - expected["logits"]).abs().max() < 1e-10 and torch.equal(found["written"], expected["written"])


# ---- the page


def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs torchrun, in one process: on several the Trainer, the loop and the names have tests of their own."""
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with launched(0, 1):
        other = llama()
        names: dict[str, Any] = {
            "Accelerator": functools.partial(accelerate.Accelerator, cpu=True),
            "Trainer": transformers.Trainer,
            "args": transformers.TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=1, **ARGUMENTS),
            "loader": DataLoader([{"input_ids": row, "labels": row} for row in tokens(6, 31)]),
            "optimizer": torch.optim.SGD(other.parameters(), lr=0.5),
            "other": other,
            "train_dataset": Texts(12, 49),
            "shard_inputs": shard_inputs,
            "register": register,
            "ids": tokens(),
        }
        for code in re.findall(r"```python\n(.*?)```", page, flags=re.S)[1:3]:
            changed = code.replace("size=4", "size=1").replace("dist.init_process_group()", "")
            exec(compile(changed, "docs/huggingface.md", "exec"), names | {"model": llama()}, found := {})
    assert found["loss"].item() > 0 and (tmp_path / "runs" / "tuned" / "model.safetensors").exists()


# ---- losses without logits


class OfLiger(transformers.modeling_outputs.CausalLMOutputWithPast):  # type: ignore[misc]
    """What liger-kernel's forwards return."""


OfLiger.__module__ = "liger_kernel.transformers.model.output_classes"


def forward_of_liger(self: Any, input_ids: Any = None, labels: Any = None, shift_labels: Any = None, **kwargs: Any) -> Any:
    """As liger-kernel's: the loss comes of hidden states and the output layer's weight, in training without logits."""
    count = kwargs.pop("num_items_in_batch")
    logits = self.lm_head(self.model(input_ids=input_ids, **kwargs)[0]).float()
    return OfLiger(loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum") / count)


def without_logits(rank: int, world: int) -> tuple[float, dict[str, torch.Tensor]]:
    with launched(rank, world):
        model = llama().train()
        context_parallel(accelerate.Accelerator(cpu=True), model, size=world, timeout=patience())
        # as the Trainer, which applies it when it begins to train
        model.forward = types.MethodType(forward_of_liger, model)
        outputs = model(tokens(), labels=tokens())
        assert outputs.logits is None
        outputs.loss.backward()
        return outputs.loss.item(), {name: p.grad for name, p in model.named_parameters()}


def test_a_loss_that_liger_computes_without_logits_is_that_of_the_whole() -> None:
    """liger-kernel 0.8.5 itself, which needs Triton, did the same under Triton's interpreter."""
    model = llama().train()
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    results = pool_of(2).run(without_logits)
    for name, p in model.named_parameters():
        torch.testing.assert_close(sum(gradients[name] for _, gradients in results) / 2, p.grad, atol=TOLERANCE, rtol=0)
    assert [found for found, _ in results] == pytest.approx([loss.item()] * 2, rel=1e-6)


# ---- refusals


@contextlib.contextmanager
def attached(model: Any, **options: Any) -> Iterator[Any]:
    with launched(0, 1):
        handle = context_parallel(accelerate.Accelerator(cpu=True), model, size=1, **options)
        try:
            yield handle
        finally:
            handle.remove()


def test_a_model_that_nobody_holds_is_freed() -> None:
    """transformers' registries, which are never emptied, held it, and its process group."""
    with launched(0, 1):
        model = llama()
        handle = context_parallel(accelerate.Accelerator(cpu=True), model, size=1)
        model(tokens(), labels=tokens()).loss.backward()
        name, alive = handle.name, weakref.ref(model)
        assert name in transformers.AttentionInterface._global_mapping
        del model, handle
        gc.collect()
    assert alive() is None and name not in transformers.AttentionInterface._global_mapping


def convolutional() -> Any:
    model = llama()
    model.model.mix = torch.nn.Conv1d(32, 32, 3)
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (bert, {}, "the loss of BertForMaskedLM is ForMaskedLMLoss, which may be no sum over positions"),
        (
            lambda: transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1)),
            {},
            "MambaForCausalLM has linear_attention",
        ),
        (lambda: torch.nn.Linear(2, 2), {}, "model is a Linear; expected a model of transformers"),
        (convolutional, {}, "a convolution, 'model.mix'"),
        (llama, {"exchange": "post"}, "exchange"),
    ],
)
def test_models_and_options_that_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    """And leave no trace."""
    model = make()

    def state() -> str:
        return str((vars(model), getattr(getattr(model, "config", None), "_attn_implementation", None)))

    before = state()
    with pytest.raises((ValueError, TypeError), match=message), attached(model, **options):
        pass
    assert state() == before and not model._forward_pre_hooks and not model._forward_hooks
    assert not [name for name in transformers.AttentionInterface._global_mapping if name.startswith("context_parallel")]


INPUTS = {
    "without labels": ({"labels": None}, "a training call of LlamaForCausalLM with input_ids and without labels"),
    "a cache": ({"past_key_values": [1]}, "past_key_values is given with labels"),
    # its name since transformers 5.24; an empty one would take keys of a part
    "an empty cache": ({"cache": transformers.DynamicCache()}, "cache is given with labels"),
    "some logits": ({"logits_to_keep": 3}, "logits_to_keep is given with labels"),
    "a mask of pairs": ({"attention_mask": torch.ones(2, 1, 50, 50)}, r"attention_mask is \(2, 1, 50, 50\); expected padding"),
    "an image": ({"pixel_values": torch.ones(2, 3, 8, 8)}, r"pixel_values has shape \(2, 3, 8, 8\)"),
    "a router's loss": ({"output_router_logits": True}, "the router's loss is no sum over positions"),
    "tuples": ({"return_dict": False}, "return_dict is False"),
    "other bounds": ({"cu_seq_lens_q": torch.tensor([0, 50])}, "expected equal bounds"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_are_refused(name: str) -> None:
    changes, message = INPUTS[name]
    model = llama().train()
    with attached(model):
        given = {"input_ids": tokens(), "labels": tokens(), **changes}
        with pytest.raises(ValueError, match=message):
            model(**{key: value for key, value in given.items() if value is not None})
        # the next call is as if nothing had been
        model(tokens(), labels=tokens()).loss.backward()
        model.eval()
        assert model(tokens()).logits.shape == (2, 50, 61)


def test_a_call_after_an_interrupt_begins_anew() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = llama()
    expected = model(tokens(), labels=tokens()).loss.item()
    with attached(model):
        hook = model.model.layers[1].register_forward_hook(interrupt)
        for labels in (tokens(), None):
            with pytest.raises(KeyboardInterrupt):
                model(tokens(), labels=labels)
        hook.remove()
        assert model(tokens(), labels=tokens()).loss.item() == pytest.approx(expected, rel=1e-6)


class Penalised(transformers.Trainer):  # type: ignore[misc]
    """Adds a sum over the logits that it is given: those of a part, so that on two processes half of it would be missing."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


OWN_LOSS = r"has its own compute_loss \(.*; expected transformers' Trainer.*context_parallel\(accelerator"
# kind, arguments, attributes set afterwards, message
TRAINERS: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (
        transformers.Trainer,
        {"label_smoothing_factor": 0.1},
        {},
        "label_smoothing_factor is set: its loss reads the logits of a whole sequence; expected",
    ),
    (transformers.Trainer, {"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha is set: its noise"),
    (transformers.Trainer, {"accelerator_config": {"dispatch_batches": True}}, {}, "dispatch_batches is True"),
    (Penalised, {}, {}, OWN_LOSS),
    (transformers.Trainer, {}, {"compute_loss": functools.partial(Penalised.compute_loss, None)}, OWN_LOSS),
    (transformers.Trainer, {}, {"_n_gpu": 2}, r"one process with 2 GPUs.*torchrun.*CUDA_VISIBLE_DEVICES=0"),
]


@pytest.mark.parametrize(("kind", "options", "attributes", "message"), TRAINERS)
def test_trainers_that_are_refused_before_training(
    kind: Any, options: dict[str, Any], attributes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with launched(0, 1):
        args = transformers.TrainingArguments(output_dir=str(tmp_path), **{**ARGUMENTS, **options})
        trainer = kind(model=llama(), args=args, train_dataset=Texts(2, 9))
        for attribute, value in attributes.items():
            setattr(trainer.args if attribute == "_n_gpu" else trainer, attribute, value)
        with pytest.raises(ValueError, match=message):
            context_parallel(trainer, size=1)


def test_calls_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with launched(0, 1):
        accelerator, model = accelerate.Accelerator(cpu=True), llama()
        call = functools.partial(context_parallel, accelerator)
        for wrong, text in (
            (lambda: context_parallel(model, size=1), "expected a Trainer, or an Accelerator and a model"),
            (lambda: call(size=1), "context_parallel\\(accelerator, model"),
            (lambda: call(model), "expected one of size=, mesh= and group="),
            (lambda: call(model, size=1, group=object()), "expected one of size=, mesh= and group="),
            (
                lambda: call(model, size=2),
                "size is 2 and there are 1 processes; expected a divisor: start it by torchrun --nproc_per_node 2",
            ),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                wrong()
        handle = call(model, size=1)
        with pytest.raises(ValueError, match=r"LlamaForCausalLM is under context_parallel already; expected remove\(\)"):
            call(model, size=1)
        handle.remove()
        accelerator.prepare(llama())
        with pytest.raises(ValueError, match="a loader or a model"):
            call(model, size=1)
        # what importorskip returns is another object
        monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.22.2")
        with pytest.raises(ImportError, match=r"transformers is 5\.22\.2; expected 5\.23 or later .*pip install"):
            context_parallel(accelerate.Accelerator(cpu=True), model, size=1)


def refused(rank: int, world: int) -> list[str]:
    with launched(rank, world):
        model, found, same = llama(), [], tokens(1, 9)
        accelerator = accelerate.Accelerator(cpu=True)
        handle = context_parallel(accelerator, model, group=dist.group.WORLD, timeout=patience())

        def drops() -> None:
            model.model.layers[0].self_attn.attention_dropout = 0.1
            model.train()(same, labels=same)

        swapped = same.flip(1) if rank else same
        batches = [functools.partial(model, x, labels=x) for x in (same + rank, swapped, same[:, : 8 + rank], tokens(1, 1))]
        for call in (*batches, functools.partial(accelerator.gather_for_metrics, ["a word"]), drops):
            try:
                call()
            except (ValueError, TypeError) as error:
                found.append(str(error))
        found.append(str(float(model.eval()(same, labels=same).loss)))
        handle.remove()
        found.append(str(float(model(same, labels=same).loss)))
        return found


def test_batches_that_differ_are_refused_on_every_process() -> None:
    for found in pool_of(2).run(refused):
        assert len(found) == 8 and "drops 0.1 of its pairs" in found[5]
        assert all("processes that share a sequence were given different batches" in text and "labels" in text for text in found[:3])
        assert "a sequence of 1 positions for 2 processes" in found[3] and "expected tensors" in found[4]
        assert float(found[6]) == pytest.approx(float(found[7]), rel=1e-6)
