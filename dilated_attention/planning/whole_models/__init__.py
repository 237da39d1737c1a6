"""Estimates of layers and models, traced with fake tensors."""
