"""What a client asks for as plain values: prompt, parameters, structure, log-probabilities,
seeds.
"""
