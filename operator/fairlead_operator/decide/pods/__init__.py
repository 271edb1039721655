"""Readings of a resource's pods, of their events and their metrics."""
