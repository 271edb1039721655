"""Everything that touches the device: batches as tensors, the model on our cache, sampling,
profiling, self-test.
"""
