"""Checks of results against float64, and a small training by dtype."""
