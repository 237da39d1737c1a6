"""KV caches, contiguous and paged, and the pass of a model that uses one."""
