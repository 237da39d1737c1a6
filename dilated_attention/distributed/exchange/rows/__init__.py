"""How rows of keys and their gradients travel between the ranks: what moves in a step, and the copies on both ends."""
