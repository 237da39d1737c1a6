"""Attention over a sequence that processes share: cases, what is compared, and how it is checked and timed."""
