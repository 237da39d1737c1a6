"""Block-sparse calls: lists of kept blocks, the choice of blocks by content, and their launches."""
