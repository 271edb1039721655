"""How matrices of 4 and 8 bits are stored, rounded and widened."""
