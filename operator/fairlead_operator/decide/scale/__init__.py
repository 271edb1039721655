"""How many replicas a resource should have."""
