"""The segmenting engine that all modules share: plan, run and merge, and the reference that the tests compare them with."""
