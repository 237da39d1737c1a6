"""Rows of results, and tables, plots and baselines made from them."""
