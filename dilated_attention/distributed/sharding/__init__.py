"""Which rank holds which positions, and how a sequence is sharded and unsharded."""
