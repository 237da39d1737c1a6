"""FlashAttention-4 (CuTe DSL): ``pip install --pre "flash-attn-4[cu13]"``. The fastest known backend here on Hopper and Blackwell."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dilated_attention.backends.base import HALVES, AttentionRequest, Backend, Capabilities, Keys, Options, Views, new_lse, new_results
from dilated_attention.backends.flash import flash4_blocks
from dilated_attention.backends.flash.flash4_launch_cache import replay_backward, replay_forward
from dilated_attention.backends.mask_convert import window_sizes
from dilated_attention.pattern.blocks.block_lists import BlockLists


class Flash4Backend(Backend):
    """``flash_attn.cute.interface._flash_attn_fwd`` and ``_flash_attn_bwd``, called directly.

    Not through torch: the wrapper in torch 2.11–2.13 unpacks a tuple that has since grown, and FlexAttention's backend FLASH returns
    lse · ln 2 in torch 2.11 and 2.12. The forward returns 2 to 5 values, depending on the release: first
    out and lse.

    On Hopper the backward of 4.0.0b36 is wrong at head dims that round up to 16, 48, 80 or 112: the relative error is near 1 in dq, and
    with grouped heads in dk and dv too. This was measured at every multiple of 8. The forward is right at all of them.
    """

    name = "flash4"
    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=HALVES,
        package="flash-attn-4",
        install='pip install --pre "flash-attn-4[cu13]"',
        compute_capabilities=((8, 0), (12, 1)),
        head_dim_multiple=8,
        window=True,
        native_window=True,
        softcap=True,
        lse_grad=True,
        max_batch=65_535,
        aligned_last=True,
        block_sizes=frozenset({(64, 64), (64, 128), (128, 64), (128, 128)}),
        block_masks=frozenset({"none", "interval"}),
        writes_views=True,
        source="H200, flash-attn-4 4.0.0b36: 530/525 TFLOP/s forward/backward at D = 64, 700/620 at 128",
    )

    def more_reasons(self, request: AttentionRequest) -> list[str]:
        capability = request.hardware.capability
        if capability is None:
            return []
        reasons = []
        major = capability[0]
        rounded = -(-request.head_dim // 16) * 16
        if request.needs_grad and major == 9 and rounded < 128 and rounded % 32:
            reasons.append(
                f"its backward on compute capability 9.0 gives wrong gradients at head_dim {request.head_dim} (4.0.0b36, measured)"
            )
        if request.needs_grad and major == 8:
            reasons.append("has no backward on compute capability 8.x")
        if request.needs_grad and major == 12 and (request.deterministic or request.window or request.softcap):
            reasons.append("its backward on compute capability 12.x is dense, without softcap and not deterministic")
        if major in (10, 11) and request.head_dim > 128 and request.head_dim != 256:
            reasons.append(f"head_dim is at most 128, or 256, on compute capability {major}.x, not {request.head_dim}")
        if request.head_dim < 8:
            reasons.append(f"head_dim is at least 8, not {request.head_dim}")
        if request.blocks is not None:
            reasons += flash4_blocks.block_reasons(request)
        return reasons

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, keys: Keys | None = None, *, out: Views = (None, None)
    ) -> tuple[Tensor, Tensor]:
        interface, (out_view, lse_view) = _interface(), out
        if keys is not None:
            assert isinstance(keys, BlockLists)
            return flash4_blocks.forward_blocks(interface, q, k, v, keys, options, out_view)
        left, right = window_sizes(options, q.shape[1], k.shape[1])
        # the kernel writes lse in rows of stride 1
        lse_rows = lse_view if lse_view is not None and lse_view.stride(-1) == 1 else new_lse(q)
        (result,) = new_results((out_view,), (q,))

        def call() -> None:
            interface._flash_attn_fwd(
                q, k, v, softmax_scale=options.scale, causal=options.causal, softcap=options.softcap, window_size_left=left,
                window_size_right=right, return_lse=True, out=result, lse=lse_rows,
            )  # fmt: skip

        settings = (options.scale, options.causal, left, right, options.softcap)
        replay_forward(interface, (q, k, v, result, lse_rows), settings, call, options.geometry)
        return result, lse_rows

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options, keys: Keys | None = None, *,
        dlse: Tensor | None = None, grads: Views = (None, None, None),
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        interface = _interface()
        if keys is not None:
            assert isinstance(keys, BlockLists)
            return flash4_blocks.backward_blocks(interface, (dout, q, k, v, out, lse), keys, options, dlse, grads[0])
        left, right = window_sizes(options, q.shape[1], k.shape[1])
        lse = _with_dense_rows(lse, q.shape[-1])
        dlse = None if dlse is None else _with_dense_rows(dlse, q.shape[-1])
        dq, dk, dv = new_results(grads, (q, k, v))

        def call() -> None:
            interface._flash_attn_bwd(
                q, k, v, out, dout, lse, softmax_scale=options.scale, causal=options.causal, softcap=options.softcap,
                window_size_left=left, window_size_right=right, deterministic=options.deterministic, dq=dq, dk=dk, dv=dv, dlse=dlse,
            )  # fmt: skip

        if options.deterministic:
            # not replayed: the semaphores that order its sums must start as zeros, which a replay does not ensure
            call()
            return dq, dk, dv
        tensors = (q, k, v, out, dout, lse, dq, dk, dv, *(() if dlse is None else (dlse,)))
        settings = (options.scale, options.causal, left, right, options.softcap, dlse is not None)
        replay_backward(q, k)(interface, tensors, settings, call, options.geometry)
        return dq, dk, dv


def _with_dense_rows(x: Tensor, head_dim: int) -> Tensor:
    """Returns x, lse or its gradient (P, G, L), with rows of stride 1, which the backward's kernels require."""
    # larger head dims have kernels of their own on compute capability 10.0, which are known to be right for contiguous x only
    return x if x.stride(-1) == 1 and head_dim <= 128 else x.contiguous()


def _interface() -> Any:
    """Returns the library's module, imported at the first launch."""
    from flash_attn.cute import interface

    return interface
