"""Conversion of a model: which layers are replaced, by what, and the handle that `convert` returns."""
