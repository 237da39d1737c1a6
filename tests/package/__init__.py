"""Tests of the package as a whole: its public names, files, forks, profiling."""
