"""A mask of pairs in FlashAttention-4's kernel language (CuTe DSL): query i sees the keys low[i] ≤ j < high[i]."""

# the DSL's types are not Python types
# mypy: ignore-errors
import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


@cute.jit
def interval_mask(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
    low = utils.scalar_to_ssa(aux_tensors[0][m_idx[0]], cutlass.Int32)
    high = utils.scalar_to_ssa(aux_tensors[1][m_idx[0]], cutlass.Int32)
    return (n_idx >= low) & (n_idx < high)
