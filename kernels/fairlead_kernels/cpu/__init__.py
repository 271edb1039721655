"""Kernels for CPUs in C++ (``csrc/``): the loader of their libraries, attention, layers.

This file imports nothing: the build reads ``sources`` where torch is absent.
"""
