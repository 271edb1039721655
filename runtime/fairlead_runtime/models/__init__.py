"""Models: where they come from, what is refused before it is read, and how they become tensors.

Owns sources, downloads, the checks on files, loading, tokenizers, and the tiny random models that
tests and `transformers` comparisons share. Never runs a forward pass: that begins in the runner.
"""
