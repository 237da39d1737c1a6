"""The segmenting engine that all modules share: plan, run, merge – and the reference that judges them."""
