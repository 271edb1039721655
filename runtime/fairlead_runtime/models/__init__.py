"""Models: the checks of their files, which of them are served, and how they are loaded.

Owns the checks on files, loading, tokenizers, and the tiny random models that tests and comparisons
with transformers share. Downloads nothing (``hub`` does) and runs no forward pass (``device``
does).
"""
