"""Quantization kernels by orientation: along rows, along columns, or both from one read; and decoding."""
