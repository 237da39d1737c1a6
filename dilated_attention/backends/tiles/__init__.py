"""Own kernels that compute a whole call: a table of tiles, walked by one launch."""
