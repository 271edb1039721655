"""The settings of an engine, what of them this build honours, and whether files and ports can be
used.
"""
