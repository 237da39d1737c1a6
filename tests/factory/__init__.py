"""Tests of the factory."""
