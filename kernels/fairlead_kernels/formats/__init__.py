"""Matrices of 4 and 8 bits: how they are stored, rounded and widened."""
