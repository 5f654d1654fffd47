"""Llama pretraining through any backend of mxref: the linear layer by recipe, a deterministic loop, ablations."""
