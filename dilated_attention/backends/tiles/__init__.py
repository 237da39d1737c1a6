"""This project's kernels that compute a whole call: one launch processes a table of tiles."""
