"""Kernels compile under Triton 3.6, which passes no format or choice on that is an attribute of a constant."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref_triton.lane.treatment import Treatment
from places import ROOT

FILES = sorted((ROOT / "backends" / "mxref_triton").rglob("*.py"))
HELD = {field.name for field in fields(Treatment) if field.type not in ("int", "float", "bool", "str")}
"""Fields of a constant that hold other constants."""


def jitted(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
    }


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
FUNCTIONS = {name for tree in TREES.values() for name in jitted(tree)}


def passed(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the places where a kernel passes an attribute of a constant to another one, and that is no number."""
    for function in jitted(tree).values():
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in FUNCTIONS:
                for argument in [*call.args, *(k.value for k in call.keywords)]:
                    if isinstance(argument, ast.Attribute) and argument.attr in HELD:
                        yield f"{path.name}:{argument.lineno}: {ast.unparse(argument)}"


def test_kernels_name_a_constant_before_they_pass_it_on():
    assert {"element", "scale"} <= HELD
    assert {"parts_of", "encode_quads", "_fold_rows", "_load"} <= FUNCTIONS
    found = [place for path, tree in TREES.items() for place in passed(path, tree)]
    assert not found, "write `S: tl.constexpr = P.scale` first, and pass S"


def test_one_that_is_passed_on_is_found():
    tree = ast.parse("@triton.jit\ndef f(code, P: tl.constexpr):\n    return parts_of(code, P.scale)\n")
    assert list(passed(Path("f.py"), tree)) == ["f.py:3: P.scale"]
