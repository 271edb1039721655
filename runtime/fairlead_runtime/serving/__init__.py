"""Between HTTP and the engine: submissions in, text out, and metrics."""
