"""What holds for every format: the input types, and the NaN that results carry."""

CANONICAL_NAN = 0x7FC00000
"""The float32 bits of every NaN that mxref produces."""

INPUT_DTYPES = ("float32", "bfloat16", "float16")
"""Input types: each is taken as the exact float32 value that it holds."""
