"""The HTTP API: OpenAI's routes on the public port, probes and operations on the admin port.

Uses the engine through ``outputs.EngineClient`` only. The entry point is ``server.serve``.
"""
