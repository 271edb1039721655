"""The HTTP face: OpenAI's routes on the public port, probes and operations on the admin port.

Knows the engine through ``outputs.ServiceFace`` alone. ``server.run`` is the way in.
"""
