"""What runs a step: forward passes and samples, decodes and mixed steps that are launched,
graphs.
"""
