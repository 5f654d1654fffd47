"""The time of MXFP4 training on an MI355X, computed and never measured.

`python -m projection` takes instruction counts of kernels compiled for gfx950, public peaks, and shares
of those peaks that were reached, by this project on an H200 or by others on a gfx950, each with its source and its
bounds. No share was chosen to match a published result; the published results are only shown beside the computed ones.
"""
