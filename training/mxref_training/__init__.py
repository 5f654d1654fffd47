"""Llama pretraining through any backend of mxref: data, model, a deterministic loop, ablations, reports."""
