"""The last import of the process that tests' processes are forked from: each would look through all that came before it, and copy it,
when it first collects garbage."""

import gc

gc.collect()
gc.freeze()
