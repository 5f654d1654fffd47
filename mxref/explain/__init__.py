"""One block, step by step: as data, as text, and as a table for a terminal."""

from mxref.explain.block import BlockExplanation, Case, ElementExplanation, explain_block

__all__ = ["BlockExplanation", "Case", "ElementExplanation", "explain_block"]
