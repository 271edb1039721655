"""The composition root: builds a running server from a configuration and a model directory."""
