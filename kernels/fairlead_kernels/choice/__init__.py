"""Chooses the kernels of a process: what serves this model on this device, and why no other
does.
"""
