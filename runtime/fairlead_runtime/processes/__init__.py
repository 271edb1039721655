"""The processes of a server, for HTTP, the engine and its ranks: how each starts, logs and ends."""
