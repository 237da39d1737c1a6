"""Memory profiling: a profile of a block of code by op, the allocator's own figures, and advice derived from them."""

from dilated_attention.profiling.ledger import OpMemory
from dilated_attention.profiling.measure import MemoryProfile, profile_memory

__all__ = ["MemoryProfile", "OpMemory", "profile_memory"]
