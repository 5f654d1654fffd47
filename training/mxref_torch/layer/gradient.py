"""Find the weights that have one reader in a graph. Only their gradients keep their bits when added in place.

Autograd first sums the gradients from all readers of a weight, and then adds the sum to `.grad`. Adding them in place
one by one would round in another order.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from mxref_torch.layer.linear import MXLinear


def sole_uses(loss: torch.Tensor) -> dict[Any, torch.Tensor]:
    """Map each node of a linear layer that is its weight's only reader to that weight.

    Assign the result to `handle.sole_uses`. The backward pass of this graph then adds each Wgrad product of a
    block format to the existing `.grad` and gives autograd nothing to add. Autograd still adds a gradient that does
    not exist yet, is not float32 and contiguous, or has hooks, and it adds everything in compiled code. Take gradients
    by `backward()` of the whole graph: `torch.autograd.grad` would get none for these weights.

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
