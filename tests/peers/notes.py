"""Why the peers' cells differ. The table refuses a note that no longer holds, and a difference without a note."""

from dataclasses import dataclass

TINY = ("2^-125", "1.5 x 2^-126", "2^-126", "2^-127")


@dataclass(frozen=True)
class Note:
    """An explanation of the cells at `rows` of `columns`."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    text: str


def _torchao(rule: str) -> list[Note]:
    column = (f"torchao {rule}",)
    divisor = (
        "divides by 1, so that all elements become zero"
        if rule == "RCEIL"
        else "divides by 2\\ :sup:`-126`, so that every value halves"
    )
    byte = "FE" if rule == "RCEIL" else "FD"
    return [
        Note(column, TINY, f"It stores byte 00, which is 2\\ :sup:`-127`, and {divisor}."),
        Note(column, ("NaN",), "The byte is the same and the block NaN; the codes mean nothing."),
        Note(
            column,
            ("Inf",),
            f"A finite byte, {byte}: the Inf becomes the largest number there, the others zero.",
        ),
    ]


GGUF = ("gguf",)
COMPRESSED = ("compressed-tensors float32", "compressed-tensors bfloat16")

FLOOR = [
    *_torchao("FLOOR"),
    Note(("gfloat float64", "gfloat float32"), ("NaN",), "It refuses the block: E2M1 has no NaN."),
    Note(
        ("gfloat float64", "gfloat float32"), ("Inf",),
        "A finite byte, FE: the Inf becomes 6 x 2\\ :sup:`127`, the others zero.",
    ),
    Note(
        ("gfloat float32", "gguf"), ("below 8",),
        "A float32 log2 rounds up to 3: the scale doubles, and every value is rounded more coarsely.",
    ),
    Note(("gfloat float32",), ("FLT_MAX",), "The float32 log2 rounds up to 128."),
    Note(
        GGUF, ("FLT_MAX",),
        "The float32 log2 rounds up to 128, and 4 x 2\\ :sup:`126` overflows in the search for the nearest value: "
        "it takes 3.",
    ),
    Note(GGUF, ("ties",), "Ties go toward zero, to the first of two equally near values."),
    Note(GGUF, ("signs",), "It never stores code 8: zeros lose their sign."),
    Note(GGUF, ("NaN", "Inf"), "The whole block becomes zero, silently."),
    Note(
        GGUF, TINY[1:],
        "The exponent is negative and wraps in 8 bits, to FF, which others read as NaN, or FE; all codes are 0.",
    ),
]  # fmt: skip

EVEN = [
    *_torchao("EVEN"),
    Note(
        ("torchao EVEN", *COMPRESSED), ("zero",),
        "Byte 00 where the dialect stores 7F: the same zeros.",
    ),
    Note(COMPRESSED, ("signs",), "`torch.sign` drops the sign of -0; that of -0.1 stays."),
    Note(
        COMPRESSED, ("3e38", "FLT_MAX", "NaN", "Inf"),
        "Rounding the bits of amax gives Inf as the scale: all elements become zero, "
        "and the byte, 7F here, is what this machine makes of Inf as an integer.",
    ),
]  # fmt: skip

CEIL_RCEIL = [
    *_torchao("CEIL"),
    *_torchao("RCEIL"),
    Note(
        ("torchao RCEIL",), ("above 6, large",),
        "A float32 log2 of amax / 6 rounds down to 80: the byte is one too small and the largest element saturates.",
    ),
]  # fmt: skip
