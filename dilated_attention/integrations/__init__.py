"""Other projects: their weights, and this package in their models."""
