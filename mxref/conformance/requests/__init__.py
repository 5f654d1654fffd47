"""Requests to a backend, and their input values.

`quantizing` is a quantization, `decoding` a dequantization, `multiplying` a scaled GEMM, `crafted` the inputs. A
request keeps the reference's answer, so a check must not change a request that another check shares.
"""
