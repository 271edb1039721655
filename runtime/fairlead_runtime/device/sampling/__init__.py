"""Sampling of a step's rows: on the host for each step, and on the device from a table of
sequences.
"""
