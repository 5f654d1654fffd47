"""The steps of a quantization, each a function of arrays: Hadamard transform, shared scale, rounding, random bits.

A step reads the numbers of a format from `mxref.formats`; none stands here. A new rule is a member of `ScaleRule` or
`Rounding`, its arithmetic in the same file, and a clause.
"""
