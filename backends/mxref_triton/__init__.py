"""The specification on GPUs: Triton kernels for AMD gfx950 and NVIDIA sm_90, held to the reference bit for bit.

The same kernels run on the CPU under Triton's interpreter (TRITON_INTERPRET=1), which is how they are tested
without a GPU.
"""

from mxref_triton.backend import TritonBackend

__all__ = ["TritonBackend"]
