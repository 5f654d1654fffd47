"""The nn.Linear behind a converted layer: what both share, and the way back."""

from __future__ import annotations

from torch import nn

from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear

_SHARED = (
    "_parameters",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Dictionaries of a module that both layers hold, so that what is registered on one is on the other too."""


def keep_plain(layer: MXLinear, source: nn.Linear) -> None:
    """Give a new layer the hooks of the linear layer it replaces, and keep that one for `plain_of`.

    `source` may be a converted layer: the plain one behind it is kept.
    """
    plain = plain_of(source) if isinstance(source, MXLinear) else source
    for name in _SHARED:
        vars(layer)[name] = vars(source)[name]
    vars(layer)["_is_full_backward_hook"] = source._is_full_backward_hook
    # In a tuple: as an attribute it would be a child, and have names in state dicts.
    vars(layer)["_plain"] = (plain,)


def plain_of(layer: MXLinear) -> nn.Linear:
    """Return the linear layer that `convert` replaced, with the Parameters, hooks and mode of the converted one.

    Raises:
        LayerError: a layer that convert has not made, or whose weights are sharded.
    """
    kept: tuple[nn.Linear, ...] = vars(layer).get("_plain", ())
    if not kept:
        raise LayerError("convert has not made this layer, so there is no nn.Linear to return to")
    if hasattr(layer.weight, "to_local"):
        raise LayerError(
            "its weight is sharded, and FSDP2 has hooks on the converted layer; save the state dict, and load it "
            "into an unconverted model"
        )
    (plain,) = kept
    for name in _SHARED:
        vars(plain)[name] = vars(layer)[name]
    vars(plain)["_is_full_backward_hook"] = layer._is_full_backward_hook
    plain.training = layer.training
    return plain
