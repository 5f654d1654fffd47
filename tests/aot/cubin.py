"""Reading the instructions of NVIDIA machine code, a cubin, which is a 64-bit ELF file."""

from __future__ import annotations

import struct

_SECTION = struct.Struct("<IIQQQQIIQQ")
"""Header of a section: name, type, flags, address, offset, bytes, link, information, alignment, size of an entry."""


def instructions(cubin: bytes) -> bytes:
    """Return the sections of instructions of a cubin, one after the other.

    Raises:
        ValueError: it has none, or is no ELF file.
    """
    if cubin[:4] != b"\x7fELF":
        raise ValueError(f"a cubin begins with {cubin[:4]!r}, not as an ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, number, names = struct.unpack_from("<3H", cubin, 58)
    headers = [_SECTION.unpack_from(cubin, table + size * i) for i in range(number)]
    at = headers[names][4]
    texts = [cubin[h[4] : h[4] + h[5]] for h in headers if cubin.startswith(b".text.", at + h[0])]
    if not texts:
        raise ValueError(f"a cubin of {number} sections has no section of instructions")
    return b"".join(texts)
