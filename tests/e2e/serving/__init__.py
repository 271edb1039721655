"""A package, so that its fixture `chat` ends with its last test."""
