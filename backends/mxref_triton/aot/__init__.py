"""Kernels compiled ahead of time, for machines that are not here: what they cost is counted and held to budgets.

`python -m mxref_triton.aot` runs the backend's own operations on tensors without data, for a GPU that only answers
what the backend asks of it. Each launch is then compiled with just the arguments, specializations and options that it
has on the real machine, and not run. The text of the machine code is what is counted: registers, spills,
instructions per element. No number here was measured on a device.
"""
