"""Rows of results, and tables and baselines made from them."""
