"""The operator's own HTTP requests: pods and the model hub."""
