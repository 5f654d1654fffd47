"""Which weights of a graph have one reader: only their gradients can be added up in place and keep their bits.

Autograd first sums what all readers of a weight give, and adds the sum to `.grad`. Added in place one by one, the same
numbers would be rounded in another order.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from mxref_torch.layer import MXLinear


def sole_uses(loss: torch.Tensor) -> dict[Any, torch.Tensor]:
    """Return the nodes of linear layers in the graph of a loss that alone read their weight, with that weight.

    It is what `StepContext.sole_uses` takes: with it, the backward pass of this very graph adds each product of Wgrad
    in MXFP4 to a `.grad` that is there already, and hands autograd nothing to add. Left as they are: a gradient that
    does not exist yet, is not float32 and contiguous, or has hooks that wait for it; and what is compiled. Take
    gradients by `backward()` of the whole graph then: `torch.autograd.grad` would get none for these weights.

    Args:
        loss: a tensor with a graph, that of one micro-batch.
    """
    readers: dict[Any, list[Any]] = defaultdict(list)
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for source, _ in node.next_functions:
            if hasattr(source, "variable"):
                readers[source].append(node)
            else:
                waiting.append(source)
    return {
        nodes[0]: leaf.variable
        for leaf, nodes in readers.items()
        if len(nodes) == 1
        and isinstance(getattr(nodes[0], "layer", None), MXLinear)
        and nodes[0].next_functions[1][0] is leaf
    }
