"""Tensors of the cache and copies of its blocks, to the host and back. Knows no model."""
