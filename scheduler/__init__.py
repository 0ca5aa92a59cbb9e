"""Policy: the memory budget, the expert cache, eviction, prediction and replay. Knows keys and bytes, not models."""
