"""Kernels compiled ahead of time, without a GPU: instructions and registers are counted and held to budgets.

`make aot`, or `python -m aot` with tests/ on the path, runs the backend's own operations on tensors without data, for a
simulated GPU that only answers the backend's questions about itself. Each launch is compiled with exactly the
arguments, specializations and options that it has on the real machine, and is not run. Registers, spills and
instructions per element are counted in the text of the machine code. No number here was measured on a device.
"""
