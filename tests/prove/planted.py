"""Faults that tests plant in Triton's IR."""

from __future__ import annotations

import re

from prove.ttir import without_locations


def flipped(text: str, op: str, conditions: dict[str, int], place: int = 0, bit: int = 0) -> str:
    """Flip a bit of one result of an operation where all conditions hold.

    Args:
        text: the IR without locations.
        op: the operation, of int32 tensors.
        conditions: numbers by what has to have them: `lane`, `program`, or the name of an int32 argument or tensor.
        place: which of the operations.
        bit: the bit.
    """
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if f"= {op} " in line][place]
    result, rest = lines[at].strip().split(f" = {op} ")
    kind = rest.rsplit(" : ", 1)[1].split(" -> ")[-1]
    truths = kind.replace("i32", "i1")
    named = {
        "lane": re.search(rf"(%\d+) = tt\.make_range .* : {re.escape(kind)}", "\n".join(lines)),
        "program": re.search(r"(%\d+) = tt\.get_program_id x", "\n".join(lines)),
    }
    new, last = [f"%8000 = {op} {rest}"], ""
    for number, (name, value) in enumerate(conditions.items()):
        found = named.get(name)
        tensor = found[1] if found else name
        base = 8100 + 10 * number
        if name == "program" or int(tensor[1:]) < 15:
            new.append(f"%{base} = tt.splat {tensor} : i32 -> {kind}")
            tensor = f"%{base}"
        new += [
            f"%{base + 1} = arith.constant dense<{value}> : {kind}",
            f"%{base + 2} = arith.cmpi eq, {tensor}, %{base + 1} : {kind}",
        ]
        if last:
            new.append(f"%{base + 3} = arith.andi {last}, %{base + 2} : {truths}")
        last = f"%{base + 3}" if last else f"%{base + 2}"
    new += [
        f"%8001 = arith.extui {last} : {truths} to {kind}",
        f"%8002 = arith.constant dense<{1 << bit}> : {kind}",
        f"%8003 = arith.muli %8001, %8002 : {kind}",
        f"{result} = arith.xori %8000, %8003 : {kind}",
    ]
    lines[at : at + 1] = new
    return "\n".join(lines)


def rare(text: str) -> str:
    """Change the code of the first element for one element and one amax, of 2^64 pairs."""
    lines = without_locations(text).splitlines()
    at = next(i for i, line in enumerate(lines) if "arith.minui" in line)
    operands = lines[at].strip().split(" = arith.minui ")[1]
    (product,) = (line for line in lines if line.strip().startswith(operands.split(",")[0] + " = tt.bitcast"))
    total = _operand(product, "tt.bitcast")
    (summed,) = (line for line in lines if line.strip().startswith(f"{total} = arith.addf"))
    v = _operand(summed, "arith.addf")
    (scaled,) = (line for line in lines if line.strip().startswith(f"{v} = arith.mulf"))
    x = _operand(scaled, "arith.mulf")
    amax = next(m[1] for line in lines if (m := re.search(r"arith\.cmpi ult, (%\d+)", line)))
    lines.insert(at, f"%8900 = tt.bitcast {x} : tensor<512xf32> -> tensor<512xi32>")
    return flipped("\n".join(lines), "arith.minui", {"%8900": 0x3FA5A5A5, amax: 0x41234567})


def one_integer(text: str) -> str:
    """Change the code of the first element for one random integer of SR."""
    lines = without_locations(text).splitlines()
    integer = next(line.split()[0] for line in lines if re.search(r"= arith\.andi %\d+, %58 ", line))
    at = next(i for i, line in enumerate(lines) if re.search(rf"= arith\.addi %\d+, {integer} ", line))
    place = sum("= arith.addi " in line for line in lines[:at])
    return flipped("\n".join(lines), "arith.addi", {integer: 0xABCD << 6}, place, 22)


def reordered(text: str) -> str:
    """Add (a + b) + (c + d) as (a + c) + (b + d), of the first four elements of a transform."""
    lines = without_locations(text).splitlines()
    at = [i for i, line in enumerate(lines) if "= arith.addf " in line]
    made = {line.split()[0]: re.findall(r"%\d+", line)[1:] for line in (lines[i] for i in at)}
    for i in at:
        left, right = re.findall(r"%\d+", lines[i])[1:]
        if left in made and right in made:
            (a, b), (c, d) = made[left], made[right]
            kind = lines[i].rsplit(" : ", 1)[1]
            lines[i : i + 1] = [
                f"%8000 = arith.addf {a}, {c} : {kind}",
                f"%8001 = arith.addf {b}, {d} : {kind}",
                f"{lines[i].split()[0]} = arith.addf %8000, %8001 : {kind}",
            ]
            return "\n".join(lines)
    raise AssertionError("no sum of sums")


def _operand(line: str, op: str) -> str:
    found = re.search(rf"{re.escape(op)} (%\d+)", line)
    assert found
    return found[1]


def one_nan(text: str) -> str:
    """Let blocks whose amax has one payload of NaN count as finite."""
    text = without_locations(text)
    found = re.search(r"(%\d+) = arith\.cmpi ult, (.*) : (.*)\n", text)
    assert found
    result, args, kind = found.groups()
    return text.replace(
        f"{result} = arith.cmpi ult, {args} : {kind}\n",
        f"%8000 = arith.cmpi ult, {args} : {kind}\n"
        f"%8001 = arith.constant dense<{0x7FA50000}> : {kind}\n"
        f"%8002 = arith.cmpi eq, {args.split(',')[0]}, %8001 : {kind}\n"
        f"{result} = arith.ori %8000, %8002 : {kind.replace('i32', 'i1')}\n",
    )
