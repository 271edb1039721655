"""The number of replicas that a resource should have."""
