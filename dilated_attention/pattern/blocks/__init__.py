"""Block-sparse patterns: which blocks of keys each block of queries keeps, and the masks of their pairs."""
