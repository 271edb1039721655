"""Proofs of a start: the served model beside transformers', sums in one order, graphs beside plain
steps. Nothing here runs in a step.
"""
