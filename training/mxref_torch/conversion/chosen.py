"""Which linear layers of a model are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from mxref_torch.errors import LayerError

Filter = Callable[[nn.Module, str], bool] | Sequence[str] | str | None
"""A function of a linear module and its name, a glob over names, a list of globs, or None for all layers."""


def chosen_linears(linears: Mapping[str, nn.Linear], filter_fn: Filter) -> dict[str, nn.Linear]:
    """Return the linear layers that a filter chooses, in their order.

    Args:
        linears: the layers of a model by their names without wrappers.
        filter_fn: as in `convert`.

    Raises:
        LayerError: a filter or one of its globs that matches nothing, a filter of another kind, or a function that
            returns neither True nor False.
    """
    if filter_fn is None:
        return dict(linears)
    first = f"the first linear layer is named {next(iter(linears))!r}"
    if callable(filter_fn):
        chosen = {}
        for name, linear in linears.items():
            found = filter_fn(linear, name)
            if not isinstance(found, bool):
                raise LayerError(
                    f"filter_fn returned {found!r} for {name!r}; return True to convert a layer, or False"
                )
            if found:
                chosen[name] = linear
        if not chosen:
            raise LayerError(f"filter_fn chose none of {len(linears)} linear layers; {first}")
        return chosen
    globs = [filter_fn] if isinstance(filter_fn, str) else filter_fn
    if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
        raise LayerError(f"filter_fn is a function, a glob or a list of globs, got {filter_fn!r}")
    if not globs:
        raise LayerError(f"filter_fn is an empty list, which chooses nothing; {first}")
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in linears):
            raise LayerError(f"filter_fn: {glob!r} matches no linear layer; {first}")
    return {
        name: linear for name, linear in linears.items() if any(fnmatchcase(name, glob) for glob in globs)
    }
