"""Tests of the modules."""
