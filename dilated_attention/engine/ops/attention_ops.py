"""The attention ops of one process, which are opaque to torch.compile. Those of a ring are in ``distributed/``."""

from __future__ import annotations

from dilated_attention.engine.ops.definition import define_attention
from dilated_attention.engine.ops.prepare import saved_elements
from dilated_attention.engine.ops.resolve import ResolvedDilated, resolve
from dilated_attention.engine.ops.resolve_blocks import ResolvedBlocks, ResolvedUnion, resolve_blocks

dilated_attention_op = define_attention(
    ResolvedDilated.name,
    resolve,
    "dilated_attention.engine.reference.reference_attention, which is plain autograd",
    new_saved=lambda inputs, settings: inputs[0].new_empty(saved_elements(inputs[0], inputs[1], settings, inputs[4])),
)
block_sparse_attention_op = define_attention(
    ResolvedBlocks.name, resolve_blocks, "softmax attention in plain autograd under the mask pattern.dense_mask(N, N, H)"
)
block_sparse_dilated_attention_op = define_attention(
    ResolvedUnion.name,
    resolve_blocks,
    "softmax attention in plain autograd with the sum of both patterns' dense_mask(N, N, H) as multiplicities",
)
