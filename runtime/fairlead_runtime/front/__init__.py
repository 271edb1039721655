"""What any HTTP server of ours has in front of what it serves: bounded connections and bodies, TLS,
API keys and their limits, strict JSON, deadlines, CORS, the drain, error bodies, the access log.

Knows no model: it imports neither torch nor transformers, so that a server before the pods has it
too.
"""
