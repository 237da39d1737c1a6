"""Settings recommended for a use case, each with its reason."""
