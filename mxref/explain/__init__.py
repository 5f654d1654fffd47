"""One block, step by step: as data, as text, as a table for a terminal, and as a link to the explorer page."""

from mxref.explain.block import explain_block
from mxref.explain.explanation import BlockExplanation, Case, ElementExplanation
from mxref.explain.link import explorer_link

__all__ = ["BlockExplanation", "Case", "ElementExplanation", "explain_block", "explorer_link"]
