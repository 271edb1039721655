"""The number of tokens of a step that the C++ kernels take through a layer at a time.

Owns the size, for the kernels and for plans of memory: what a layer keeps of its slab is not there
once per token of the step. Pure: imports nothing.
"""

# Fewer read the layer's weights too often, of more the activations leave the caches. A power of
# two, so that parts of steps stand for them exactly.
SLAB = 1024
