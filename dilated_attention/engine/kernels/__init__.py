"""Calls on this project's own kernels: tables of tiles, and nested branches whose pairs are visited once."""
