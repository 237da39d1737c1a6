"""Tests of attention over several processes, on gloo."""
