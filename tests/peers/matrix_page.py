"""The page docs/explanation/matrix.rst: the table clause by implementation, and a block for each of its red cells."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.records import RECORDS, newest, read
from mxref.conformance.clauses import by_rank
from peers.verdicts import DIFFERS, MASKED, PASSES
from rst_table import csv_table

PART = "matrix.inc"
EXPLORER = "../explorer/index.html"
SHOWN = 6
"""Numbers of a block that are shown; the command and the explorer have all."""

MILD = {"zeros": "signs of zeros", "same": "same values"}
"""What differs in a breach that changes no value."""

Column = tuple[str, str, Mapping[str, Any]]
"""Name, version and what the record has."""


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the tables of the newest record by the name under which the page includes them."""
    return {PART: render(read(newest("matrix", records)))}


def render(record: Mapping[str, Any]) -> str:
    """Return the tables and the blocks as reStructuredText."""
    columns = [(name, each["version"], each) for name, each in record["columns"].items()]
    columns += [(name, each["facts"].get("device", ""), each) for name, each in record["machines"].items()]
    quantizers = [each for each in columns if _clauses([each], "scale.", "rounding.", "gemm.")]
    decoders = [each for each in columns if _clauses([each], "dequantize.")]
    absent = {name: why for name, why in record["absent"].items() if name not in record["machines"]}
    where = record["environment"]
    return "\n".join(
        [
            f"Run on {record['date']}, {where['machine']}, {where['processor']}, Python {where['python']}, "
            f"NumPy {where['numpy']}, against specification {record['specification']}.\n",
            _heading("Quantization"),
            _table(quantizers, absent, "scale.", "rounding.", "gemm.", "conformance."),
            _heading("Decoding"),
            _table(decoders, {}, "dequantize."),
            _heading("Not run"),
            csv_table(["implementation", "why"], _not_run(record, absent), widths=(30, 70)),
            *(text for column in columns for text in _details(*column)),
        ]
    )


def _not_run(record: Mapping[str, Any], absent: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the implementations, and the settings of those that ran, that were not asked; and why."""
    yield from absent.items()
    for name, column in record["columns"].items():
        for setting in column["settings"]:
            if "not_run" in setting:
                yield f"{name}, {setting['format']}, {setting['setting']}", setting["not_run"]


def _clauses(columns: list[Column], *beginnings: str) -> list[str]:
    found = {
        clause for _, _, each in columns for setting in each["settings"] for clause in setting["clauses"]
    }
    return [clause for clause in by_rank(found) if clause.startswith(beginnings)]


def _table(columns: list[Column], absent: Mapping[str, str], *beginnings: str) -> str:
    """Return the table of the clauses with these beginnings: a column for each implementation."""
    rows = [
        [
            f":clause:`{clause}`",
            *(_cell(*column, clause) for column in columns),
            *(":absent:`not run`" for _ in absent),
        ]
        for clause in _clauses(columns, *beginnings)
    ]
    return csv_table(["clause", *(name for name, _, _ in columns), *absent], rows, "matrix")


def _cell(name: str, version: str, column: Mapping[str, Any], clause: str) -> str:
    """Return the outcome of a clause over all settings of an implementation, in words."""
    found = [setting["clauses"][clause] for setting in column["settings"] if clause in setting["clauses"]]
    wrong = [each for each in found if each["outcome"] == DIFFERS]
    if wrong:
        what = next((text for key, text in MILD.items() if all(each.get(key) for each in wrong)), "differs")
        many = f" {len(wrong)}/{len(found)}" if len(found) > 1 else ""
        return f":ref:`{what}{many} <{_label(name, clause)}>`"
    for outcome in (PASSES, "refuses", MASKED):
        if any(each["outcome"] == outcome for each in found):
            return f":{outcome}:`{outcome}`"
    return "–"


def _details(name: str, version: str, column: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of an implementation: its facts, and a table of blocks for each clause that differs."""
    wrong = [
        clause
        for clause in _clauses([(name, version, column)], "")
        if any(setting["clauses"].get(clause, {}).get("outcome") == DIFFERS for setting in column["settings"])
    ]
    if not wrong:
        return
    yield _heading(f"{name} {version}".strip())
    facts = "; ".join(f"{key} {value}" for key, value in column.get("facts", {}).items())
    settings = len(column["settings"])
    yield f"{settings} setting{'s' * (settings > 1)}{f', recorded elsewhere: {facts}' if facts else ''}.\n"
    for clause in wrong:
        yield f".. _{_label(name, clause)}:\n\n:clause:`{clause}`\n"
        yield csv_table(
            ["settings", "block", "mxref", "stored", "see"], _blocks(column, clause), "stacked breach"
        )


def _blocks(column: Mapping[str, Any], clause: str) -> Iterator[list[str]]:
    """Yield a row for each format: the settings that differ, and the smallest block among theirs."""
    formats: dict[str, list[Mapping[str, Any]]] = {}
    for setting in column["settings"]:
        if setting["clauses"].get(clause, {}).get("outcome") == DIFFERS:
            formats.setdefault(setting["format"], []).append(setting)
    for made, some in formats.items():
        first = min(some, key=lambda setting: _size(setting["clauses"][clause]))
        found = first["clauses"][clause]
        names = list(map(_title, [first, *(setting for setting in some if setting is not first)]))
        settings = f"{made}, {names[0]}" + (f"; also {', '.join(names[1:])}" if names[1:] else "")
        if "message" in found:
            yield [settings, found["message"], "", "", ""]
            continue
        words = [f"{text} only" for key, text in MILD.items() if found.get(key)][:1]
        if found.get("under"):
            words.append(f"these bits under {found['under']}")
        if found["link"]:
            words.append(f"`explorer <{EXPLORER}#{found['link']}>`__")
        yield [
            settings,
            _numbers(found["inputs"]),
            _stored(found["expected"]),
            _stored(found["got"]),
            "; ".join(words),
        ]


def _title(setting: Mapping[str, Any]) -> str:
    """Return the name of a setting, with the order of operations by which it is judged if that is not the real one."""
    own = setting.get("treatment", {}).get("arithmetic")
    return f"{setting['setting']} by the arithmetic {own}" if own else setting["setting"]


def _size(found: Mapping[str, Any]) -> int:
    return sum(word != "0x00000000" for word in found.get("inputs", ()))


def _numbers(words: list[str]) -> str:
    """Return the numbers of a block that are not +0, each with its place."""
    if not words or not words[0].startswith("0x"):
        return "; ".join(words)
    live = [(i, word) for i, word in enumerate(words) if int(word, 16)]
    shown = [
        f"x[{i}] = {struct.unpack('>f', bytes.fromhex(word[2:]))[0]:.9g} (``{word}``)" for i, word in live
    ]
    if len(live) > SHOWN:
        return f"{', '.join(shown[:SHOWN])}, and {len(live) - SHOWN} more"
    return ", ".join(shown) or f"{len(words)} zeros"


def _stored(text: str) -> str:
    """Return the scale and the bytes of the codes, without the zeros at their end."""
    short = re.sub("( 00)+$", "", text)
    return f"``{short}{' 00' * short.endswith('codes')}``" if text else ""


def _label(name: str, clause: str) -> str:
    return f"matrix-{name}-{clause}".lower().replace(".", "-").replace("_", "-")


def _heading(text: str) -> str:
    return f"{text}\n{'-' * len(text)}\n"
