"""Tests of everything that needs one GPU."""
