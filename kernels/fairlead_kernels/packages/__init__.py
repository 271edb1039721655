"""Kernels for GPUs from other projects: flashinfer's attention, humming's products of 4 bits."""
