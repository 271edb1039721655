"""Comparisons of kernels with their definitions at start, and the timing of attention."""
