"""Estimates of one attention call: pairs, FLOPs, memory, communication and time."""
