"""Optimizer steps that never wait for the device, and on a GPU are one CUDA graph."""
