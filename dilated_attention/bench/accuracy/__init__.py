"""Checks of results against float64, and of their repeatability."""
