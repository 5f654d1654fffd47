"""Tests whose kernels run under the interpreter of Triton."""
