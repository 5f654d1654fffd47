"""The steps of a quantization, each a function of arrays: Hadamard transform, shared scale, rounding, random bits."""
