"""Bodies of requests: their fields, checks and defaults, and the prompts that they mean."""
