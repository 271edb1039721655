"""Attention and a layer's operations in plain torch, which run on every device."""
