"""The API server: the client, the watches, the Lease, and what the operator last saw."""
