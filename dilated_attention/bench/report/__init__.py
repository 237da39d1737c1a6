"""Rows of results, and tables made from them."""
