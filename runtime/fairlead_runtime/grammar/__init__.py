"""Structured output through llguidance: compiling, checking in a killable child, and the masks of
allowed tokens. The only room that imports llguidance.
"""
