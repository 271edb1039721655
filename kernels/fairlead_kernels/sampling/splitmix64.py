"""Constants of splitmix64 (Steele, Lea and Flood, OOPSLA 2014). It is written for integers, for
NumPy's vectors and for tensors, and all forms give the same words. Imports nothing.
"""

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step
MUL1 = 0xBF58476D1CE4E5B9
MUL2 = 0x94D049BB133111EB
