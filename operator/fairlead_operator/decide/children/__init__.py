"""The objects of a resource: what they should be, and what must change."""
