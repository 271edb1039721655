"""What pods, events and metrics say about a resource."""
