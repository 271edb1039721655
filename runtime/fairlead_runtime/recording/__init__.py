"""A run as a file: record it, replay it, show it."""
