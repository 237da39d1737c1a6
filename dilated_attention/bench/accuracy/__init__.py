"""Checks of results against float64."""
