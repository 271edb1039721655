"""The composition root: configuration and a model directory become a running server."""
