"""Interfaces that every implementation of attention and of a layer's operations has, and the plain
definitions that all are compared with.
"""
