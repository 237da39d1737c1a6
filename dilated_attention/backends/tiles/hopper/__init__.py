"""The kernels over a table of tiles for Hopper, in Gluon."""
