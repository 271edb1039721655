"""Kernels for GPUs in Triton: attention, layers, experts, and forms whose sums have one order."""
