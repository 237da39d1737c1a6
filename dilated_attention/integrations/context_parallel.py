"""Context parallelism for transformers' ``Trainer`` and for accelerate: ``context_parallel(trainer, size=4)`` before ``trainer.train()``.

The batch that a model is called with is whole, and equal on the W processes of a group. Inside the call it is cut, and each process
computes its part of the loss, the sum over its own targets divided by the number of all. What the model returns has

    value     Σ over the group of the parts, which is the loss of the whole
    gradient  W · d(part), so that the mean over all processes, which DDP and FSDP take, is the mean over the groups of the whole gradient

so that nothing outside the model needs to know: the loss scale, gradient accumulation, clipping and logging stay transformers'.

How it gets into a model: under a name of its own, ``ContextParallel`` registers an attention (``_attend``) and a mask function (``_mask``)
with transformers, and sets that name in the model's configs. It replaces the model's loss (``_loss``). Hooks before and after the model's
forward cut its inputs (``_enter``) and sum its loss (``_leave``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention.distributed.comm.call_consistency import agree
from dilated_attention.distributed.comm.group import members_of
from dilated_attention.distributed.sharding.layout import unshard_sequence
from dilated_attention.integrations._hf_attend import attend, warn_of_saving
from dilated_attention.integrations._hf_mask import KeyMask, key_mask, sequence_of, shard_inputs
from dilated_attention.integrations._hf_settings import (
    REGISTERED,
    Settings,
    check_release,
    checked,
    configs_of,
    forget,
    interfaces,
    other_layers,
    remember,
    ropes_of_length,
    settings_of,
)
from dilated_attention.integrations._hf_trainers import adapt_trainer, check_accelerator, check_trainer, replace, share_batches
from dilated_attention.pattern.checks import as_int

__all__ = ["ContextParallel", "context_parallel"]

# tensors among the inputs that have no dimension of positions
_UNCUT = ("cu_seq_lens_q", "cu_seq_lens_k", "num_items_in_batch")
# numbers in the names of attentions that are registered here
_numbers = itertools.count()


@dataclass(eq=False)
class _Call:
    """A forward under way whose batch is cut: N, the bounds of its documents, its last position where RoPE asks for it, and whether the
    model has called ``_mask`` and ``_loss`` of ``ContextParallel``."""

    seq_len: int
    cu_seqlens: torch.Tensor | None
    last: int = 0
    has_mask: bool = False
    has_loss: bool = False


class ContextParallel:
    """What ``context_parallel`` attached to a model.

    Attributes:
        size, rank: W and this process's rank in its group.
        group: the ProcessGroup; None for one process.
        layout: of the rows; ``unshard_sequence(handle.group, [logits], [1], layout=handle.layout)`` makes logits whole.
        whole_logits: whether a call with labels and without gradients returns the logits of all positions, on all processes.
    """

    def __init__(
        self, model: Any, place: Any, *, layout: str | None, exchange: str | None, timeout: float, undo: contextlib.ExitStack
    ) -> None:
        # place: the processes that share a sequence, as a DeviceMesh of one axis or a ProcessGroup; None for one process
        members = members_of(place)
        self._processes, self._members = place, members
        self.group, self.rank, self.size = members.group, members.rank, members.size
        # without the adapters that PEFT put around it
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        _check_model(model, self.base)
        self.timeout, self.whole_logits = timeout, False
        self.undo = undo
        self._call: _Call | None = None
        # number of hooks that are entered: of the outer model, and of the base within it
        self._depth = 0
        self._outer = model
        given = {name: value for name, value in (("layout", layout), ("exchange", exchange)) if value is not None}
        attentions, masks = interfaces()
        original = self.base.config._attn_implementation or "sdpa"
        # an attention that is not registered here is one of transformers, and dense
        settings = REGISTERED.get(original, Settings("ring", {"layout": "zigzag"}, None))
        if original in REGISTERED:
            warn_of_saving(original, self.base.config)
        if settings.kind == "block_sparse":
            raise ValueError(
                f"attn_implementation is {original!r}, a block pattern, which transformers models have on one process only; expected a "
                'dense model or "dilated"'
            )
        kind = "ring" if settings.kind == "ring" else "ring_dilated"
        # the processes given here replace those of the model's setting, and every batch has a length of its own
        options = {name: value for name, value in settings.options.items() if name not in ("mesh", "seq_len")}
        settings = checked(kind, {**options, "timeout": self.timeout, "group": place, **given})
        self.name = f"context_parallel_{next(_numbers)}"
        remember(self.name, settings)
        # once: by ``remove``, or where nobody calls it, with the model
        forgetting = weakref.finalize(self, forget, self.name)
        forgetting.atexit = False
        self.undo.callback(forgetting)
        resolved = settings_of(self.name, self.base.config)
        for option, value in given.items():
            if resolved.options[option] != value:
                raise ValueError(
                    f"{option} is {value!r}, and the model's config says {resolved.options[option]!r}; expected one of them: "
                    f"configure(model, {option}=None) removes the latter"
                )
        self.layout = resolved.options.get("layout", "contiguous")
        # registries are looked up through an instance, and share one mapping per class
        self._mask_of_model = masks()[original]
        # a registry holds functions for good, and must not hold the model with them
        living: Any = weakref.ref(self)
        attentions.register(self.name, lambda *args, **options: living()._attend(*args, **options))
        masks.register(self.name, lambda *args, **options: living()._mask(*args, **options))
        # the configs of the model and its parts, each once, without those that name another attention
        configs = [each for module in self.base.modules() if hasattr(module, "config") for each in configs_of(module.config)]
        self._configs = list({id(each): each for each in configs if each._attn_implementation == original}.values())
        self._original = original
        self._set_attention(self.name)
        self.undo.callback(self._set_attention, original)
        self._loss_of_model = self.base.loss_function
        replace(undo, self.base, "_loss_function", self._loss)
        # hooks on both, since PEFT's model calls its base's forward, which runs no hooks of the base, but generate() calls the base itself
        for module in {id(each): each for each in (model, self.base)}.values():
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            undo.callback(module.register_forward_pre_hook(functools.partial(self._enter, names), with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True).remove)
        # rotations whose frequencies follow from the last position that they are given, which is in another process's part
        follows = any(map(ropes_of_length, configs_of(self.base.config)))
        self._follows_length = [module for module in self.base.modules() if follows and hasattr(module, "rope_type")]
        for module in self._follows_length:
            undo.callback(module.register_forward_pre_hook(self._add_last, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(self._drop_last).remove)

    def remove(self) -> None:
        """Makes the model, and the trainer or accelerator, what they were. Loaders that were prepared keep their batches."""
        self.undo.close()

    def _set_attention(self, name: str) -> None:
        """Makes the model's layers look up their attention and masks under this name."""
        for config in self._configs:
            config._attn_implementation_internal = name

    def _attend(self, module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        # layers that are recomputed in the backward come here outside of a call, so the mask, not self._call, says what is cut
        if not isinstance(attention_mask, KeyMask) or attention_mask.seq_len is None:
            raise ValueError(
                f"{type(module).__name__} is called outside of its model, or makes its own mask ({type(attention_mask).__name__}); "
                "expected a model that transformers' masking_utils makes the masks of, called as model(input_ids=…, labels=…)"
            )
        if self.size > 1 and module.training and options.get("dropout"):
            # pairs are dropped by seed and position, and shards of unequal length draw unequal seeds
            raise ValueError(
                f"{type(module).__name__} drops {options['dropout']} of its pairs; expected 0 on several processes: set the dropout of "
                "attention in its config, e.g. attention_dropout=0.0"
            )
        return attend(self.name, module, query, key, value, attention_mask, **options)

    def _mask(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if call is None:
            # generate() prepares the masks of a static cache before it calls the model
            return self._mask_of_model(*args, **kwargs)
        call.has_mask = True
        # key_mask would take jumps in the positions of this process's rows for bounds of documents; the call knows the bounds
        mask = key_mask(*args, is_shared=True, **kwargs)
        return dataclasses.replace(mask, cu_seqlens=call.cu_seqlens, seq_len=call.seq_len)

    def _add_last(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """The hook before a rotation: adds the last position of the whole sequence to this process's."""
        if self._call is None:
            return None
        given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        positions: torch.Tensor = given["position_ids"]
        last = positions.new_full((positions.shape[0], 1), self._call.last)
        return (), given | {"position_ids": torch.cat((positions, last), 1)}

    def _drop_last(self, module: torch.nn.Module, args: Any, outputs: Any) -> Any:
        """The hook after it: leaves the row of that position out."""
        if self._call is None:
            return None
        # cosines and sines, or complex numbers
        return outputs[:, :-1] if isinstance(outputs, torch.Tensor) else tuple(x[:, :-1] for x in outputs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a model under context_parallel was to be copied, whose hooks hold a process group; expected remove() before")

    def _enter(self, names: list[str], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """The hook before a forward whose parameters are called ``names``: returns this process's part of the inputs, as (args, kwargs);
        None leaves them as they are."""
        if module is self._outer:
            # no model is called within itself, so a call that is still open was interrupted, and torch called no hooks at its end
            self._depth, self._call = 0, None
            self._set_attention(self.name)
        self._depth += 1
        if self._depth > 1:
            # the base within the outer model, whose inputs are cut already
            return None
        given = {name: value for name, value in (*zip(names, args, strict=False), *kwargs.items()) if value is not None}
        if "labels" not in given:
            if module.training and torch.is_grad_enabled():
                raise ValueError(
                    f"a training call of {type(module).__name__} with {', '.join(given)} and without labels: the loss of a sequence that "
                    "processes share is computed inside the model; expected model(input_ids=…, labels=…), or model.eval()"
                )
            # each process computes this call alone; _leave sets the name back
            self._set_attention(self._original)
            return None
        # before all checks of values: if one process alone refused its inputs, the others would wait for it
        self._check_equal(given)
        _check_inputs(given, self.base.config, self.size)
        part = shard_inputs(
            {name: x for name, x in given.items() if name not in ("max_length_q", "max_length_k")},
            group=self._processes,
            layout=self.layout,
        )
        # bounds count in the whole sequence, but the model would apply them to this process's rows; _mask passes them on instead
        bounds = part.pop("cu_seq_lens_q", None)
        part.pop("cu_seq_lens_k", None)
        if "attention_mask" not in given or bool(given["attention_mask"].all()):
            # shard_inputs adds a mask of ones, so that jumps of positions are not taken for bounds of documents. These calls know the
            # bounds, and kernels without padding are faster
            part.pop("attention_mask", None)
        self._call = _Call(length := sequence_of(given).shape[1], bounds)
        if self._follows_length:
            positions = given.get("position_ids")
            self._call.last = length - 1 if positions is None else int(positions.max())
        # a cache would hold the keys of one part only
        return (), part | {"use_cache": False}

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """The hook after a forward: returns the outputs with the loss of the whole, and what is asked for of all positions; None leaves
        them as they are."""
        self._depth -= 1
        if self._depth:
            return None
        call, self._call = self._call, None
        if call is None:
            # a call without labels
            self._set_attention(self.name)
            return None
        if outputs is None:
            # the forward has raised an error
            return None
        # Liger's forwards, and the heads that TRL adds, do not call loss_function: they compute the loss from shift_labels and
        # num_items_in_batch themselves
        library = type(outputs).__module__.partition(".")[0]
        call.has_loss |= library in ("liger_kernel", "trl")
        if not call.has_mask or not call.has_loss:
            missing = "its loss by loss_function" if call.has_mask else "its masks by transformers' masking_utils"
            raise ValueError(f"{type(self.base).__name__} does not compute {missing}; expected a model such as LlamaForCausalLM")
        if not hasattr(outputs, "items"):
            raise ValueError(f"the model returned a {type(outputs).__name__}; expected return_dict=True, by which logits are found")
        values = dict(outputs.items())
        if self.group is not None:
            loss = values["loss"].detach().clone()
            dist.all_reduce(loss, group=self.group)
            # value and gradient as above: the difference is 0, and its gradient is that of the part
            values["loss"] = loss + self.size * (values["loss"] - values["loss"].detach())
        if library == "trl":
            if self.size > 1:
                # TRL's trainer computes its loss and metrics from log-probabilities and other values of each position, (B, n)
                names = [name for name, x in values.items() if x.ndim == 2]
                dims = [1] * len(names)
                whole = unshard_sequence(self.group, [values[name] for name in names], dims, layout=self.layout, seq_len=call.seq_len)
                values |= zip(names, whole, strict=True)
        elif self.whole_logits and not torch.is_grad_enabled():
            others = sorted(values.keys() - {"loss", "logits"})
            if others:
                raise ValueError(f"the model returns {', '.join(others)}; expected only loss and logits, of which metrics are computed")
            if self.size > 1:
                values["logits"] = unshard_sequence(self.group, [values["logits"]], [1], layout=self.layout, seq_len=call.seq_len)[0]
        return type(outputs)(**values)

    def _check_equal(self, given: dict[str, Any]) -> None:
        """Refuses, on all processes, a batch that differs between them.

        Every batch is checked, since samplers may begin to differ at any of them. It costs a few numbers through the store, which is little
        beside a training step.
        """
        if self.size == 1:
            return
        digests = {name: f"{tuple(x.shape)} {x.dtype} {_checksum(x)}" for name, x in given.items() if isinstance(x, torch.Tensor)}
        try:
            agree(self._members, {"function": "a model under context_parallel", **digests}, {}, self.timeout)
        except ValueError as error:
            raise ValueError(
                f"processes that share a sequence were given different batches: {error}. Expected equal ones: prepare loaders after "
                "context_parallel, and make data sets and samplers that draw alike on all processes"
            ) from error

    def _loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The model's loss function. In a call whose batch is cut, it gets this process's targets and divides by the number of all."""
        call = self._call
        if call is not None:
            if kwargs.get("shift_labels") is None or kwargs.get("num_items_in_batch") is None:
                raise ValueError(
                    f"{type(self.base).__name__} does not hand shift_labels and num_items_in_batch to its loss, without which the loss of "
                    "a part is not known; expected a model whose forward passes **kwargs on, such as LlamaForCausalLM"
                )
            call.has_loss = True
        loss: torch.Tensor = self._loss_of_model(*args, **kwargs)
        return loss


def _check_model(model: Any, base: Any) -> None:
    """Refuses, by ValueError or TypeError, what ``context_parallel`` cannot train.

    That is: objects that are no model of transformers, models that are under it already, forwards without **kwargs, losses that are no sum
    over positions, layers that mix positions other than by attention, and adapters that put tokens before the sequence.
    """
    name = type(base).__name__
    if str(getattr(getattr(base, "config", None), "_attn_implementation", "")).startswith("context_parallel_"):
        raise ValueError(f"{name} is under context_parallel already; expected remove() of what the call before returned, or no second call")
    if not hasattr(base, "loss_function") or not hasattr(base, "config"):
        raise TypeError(f"model is a {name}; expected a model of transformers before it is prepared, e.g. LlamaForCausalLM")
    parameters = inspect.signature(type(base).forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(f"{name}.forward takes no **kwargs, by which its loss knows of the other parts; expected e.g. LlamaForCausalLM")
    if not base._can_set_attn_implementation():
        raise ValueError(f"{name} computes its attention itself; expected a model of transformers' attention interface")
    if base.loss_function is not importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss:
        found = getattr(base.loss_function, "__name__", base.loss_function)
        raise ValueError(f"the loss of {name} is {found}, which may be no sum over positions; expected that of causal language models")
    for config in configs_of(base.config):
        others = other_layers(config)
        if others or getattr(base, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
            found = ", ".join(sorted(others)) or "recurrent layers or an encoder"
            raise ValueError(f"{name} has {found}, which need all positions in one process; expected full and sliding attention only")
    mixing = next((key for key, module in base.named_modules() if isinstance(module, torch.nn.modules.conv._ConvNd)), None)
    if mixing is not None:
        raise ValueError(f"{name} has a convolution, {mixing!r}, which reads neighbouring positions; expected attention only")
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise ValueError(f"the adapter is {adapter.peft_type}, which puts tokens before each part; expected one of weights, e.g. LoRA")


def _check_inputs(given: dict[str, Any], config: Any, size: int) -> None:
    """Refuses, by ValueError or TypeError, inputs that cannot be cut into a part for each process."""
    length = sequence_of(given).shape[1]
    if length < size:
        raise ValueError(
            f"a sequence of {length} positions for {size} processes; expected at least one for each: drop or pad it, or pack it with others"
        )
    if given.get("output_router_logits", getattr(config, "output_router_logits", False)):
        raise ValueError(
            "output_router_logits is True: the router's loss is no sum over positions; expected False (of TRL's SFTTrainer "
            "router_aux_loss_coef=0.0 in SFTConfig)"
        )
    # transformers 5.24 calls past_key_values cache
    for name in ("past_key_values", "cache", "logits_to_keep", "output_attentions"):
        # 0 and False ask for nothing. A cache, or a tensor of indices, is no int: it asks for something, whatever its truth value
        if not isinstance(given.get(name, False), int) or given.get(name):
            raise ValueError(f"{name} is given with labels; expected none where processes share a sequence")
    if given.get("return_dict") is False:
        raise ValueError("return_dict is False; expected True, by which loss and logits are found")
    mask = given.get("attention_mask")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask is {shape}; expected padding, (B, {length}): other pairs than the model's own cannot be cut")
    for name, x in given.items():
        if not isinstance(x, torch.Tensor) or x.ndim == 0 or name in _UNCUT:
            continue
        if x.ndim < 2 or x.shape[1] != length or (name == "position_ids" and x.ndim != 2):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (B, {length}, …), a value for each position, which can be cut")


def _checksum(x: torch.Tensor) -> int:
    """Returns a number that differs, but for one case in very many, if the values do, or the order of integers."""
    flat = x.detach().reshape(-1)
    if x.is_floating_point():
        # embeddings are large: no copy of them in a wider type
        return int(flat.sum(dtype=torch.float64).view(torch.int64))
    # even factors would hide a change of the highest bit
    return int(((flat.to(torch.int64) + 1) * torch.arange(1, 2 * flat.numel() + 1, 2, device=x.device)).sum())


def context_parallel(
    trainer_or_accelerator: Any,
    model: Any = None,
    *,
    size: int | None = None,
    mesh: Any = None,
    group: Any = None,
    layout: str | None = None,
    exchange: str | None = None,
    timeout: float = 540.0,
) -> ContextParallel:
    """Trains a causal language model on sequences that groups of W processes share; the other processes are data parallel.

        context_parallel(trainer, size=4)                        # before trainer.train()
        context_parallel(accelerator, model, size=4)             # before accelerator.prepare(model, optimizer, loader)

    Every process of a group gets the same batch, different groups different ones. A call of the model with ``labels`` cuts the batch:
    labels are shifted before, positions and packed documents are those of the whole, any length N ≥ W is possible. Loss, gradients and
    every step are those of the same training with the data-parallel processes alone; but dropout outside of attention draws other elements,
    and dropout in attention is refused (W > 1). ``logits`` are those of the process's own positions; ``Trainer.predict`` and
    ``compute_metrics`` get them whole. A call without labels, such as ``generate()``, is computed by each process alone with the model's
    own attention.

    A model with an attention of transformers stays exactly dense (windows, sinks and softcaps included); one with ``"dilated"``,
    ``"ring_dilated"`` or ``"ring"`` keeps its settings. What is saved names the model's own attention: a dense model is a plain one.
    Logits of long sequences need not exist: Liger's kernels (``use_liger_kernel=True``) compute the loss without them.

    Args:
        trainer_or_accelerator: a ``Trainer``, or an ``Accelerator`` whose loaders are prepared afterwards.
        model: with an accelerator, the model before it is prepared; PEFT's adapters included.
        size: W consecutive processes share a sequence; it divides the number of processes. Or give ``mesh`` or ``group``.
        mesh, group: a DeviceMesh of one axis, e.g. ``mesh["cp"]``, or a ProcessGroup; its processes share a sequence.
        layout: see ``ring_attention``; None for the model's setting, for dense models ``"zigzag"``, which balances causal attention.
        exchange: see ``ring_attention``; None for the model's setting, for dense models ``"auto"``.
        timeout: seconds that a process waits for the others of its group, of which one may be saving a checkpoint.

    Returns:
        A ``ContextParallel``, whose ``remove()`` makes the model and the trainer what they were.

    Raises:
        ValueError, TypeError: the model's loss is no sum over positions, its layers mix positions other than by attention, the trainer has
            a loss of its own or an option that needs the whole sequence in one process, or an argument is not accepted.
        ImportError: transformers is older than 5.23.
    """
    check_release((5, 23), "context_parallel")
    trainer = trainer_or_accelerator if hasattr(trainer_or_accelerator, "accelerator") else None
    accelerator = trainer_or_accelerator if trainer is None else trainer.accelerator
    if not hasattr(accelerator, "prepare_data_loader"):
        raise TypeError(f"trainer_or_accelerator is a {type(accelerator).__name__}; expected a Trainer, or an Accelerator and a model")
    if (model is None) == (trainer is None):
        raise ValueError("expected context_parallel(trainer, size=…), which has a model, or context_parallel(accelerator, model, size=…)")
    if trainer is not None:
        check_trainer(trainer)
        model = trainer.model
    check_accelerator(accelerator)
    if sum(x is not None for x in (size, mesh, group)) != 1:
        raise ValueError("expected one of size=, mesh= and group=: the processes that share a sequence")
    # None, with size alone, is one process
    processes = mesh if group is None else group
    if size is not None:
        size = as_int("size", size, minimum=1)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % size:
            raise ValueError(
                f"size is {size} and there are {world} processes; expected a divisor: start it by torchrun --nproc_per_node {size}"
            )
        if world > 1:
            processes = init_device_mesh(accelerator.device.type, (world // size, size), mesh_dim_names=("dp", "cp"))["cp"]
    # an error undoes what was attached until then
    with contextlib.ExitStack() as undo:
        handle = ContextParallel(model, processes, layout=layout, exchange=exchange, timeout=timeout, undo=undo)
        share_batches(accelerator, handle.group, undo)
        if trainer is not None:
            adapt_trainer(trainer, handle, undo)
        # from here on it is undone by ``remove``
        handle.undo = undo.pop_all()
    return handle
