"""The way from settings and a model's directory to an engine that is ready, or to the reason why
not.
"""
