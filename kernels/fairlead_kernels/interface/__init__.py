"""What every implementation of attention and of a layer's operations must offer, and the plain
definitions that all are compared with.
"""
