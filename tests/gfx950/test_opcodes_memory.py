"""Loads and stores of every width, bounds, guards, and how arguments arrive."""

import numpy as np
import pytest

from gfx950.bench import OLD, machine
from gfx950.errors import Gfx950Error
from gfx950.machine import Machine

pytestmark = pytest.mark.study

LANE = np.arange(64)
ENABLED = 0xFFFF
DATA = np.arange(256, dtype=np.uint8) ^ 0x80
"""Byte i is i + 128 mod 256: signs differ between neighbours of all widths."""


def at(first: int, size: int, *, sext: bool = False, width: int = 4) -> int:
    """Return the register(s) that a load of DATA[first : first + size] fills."""
    value = int.from_bytes(DATA[first : first + size].tobytes(), "little", signed=sext)
    return value & ((1 << 8 * width) - 1)


def launch(line: str, *, pitch: int, kind: str) -> tuple[Machine, np.ndarray]:
    """Execute on a buffer of 256 bytes; lane i, i < 16, has the byte offset pitch * i in v6."""
    m = machine([line], lds=256)
    data = DATA.copy()
    address = m.memory.add(data)
    m.lds.bytes[:] = DATA
    m.state.vgpr[:] = OLD
    m.state.vgpr[6] = pitch * LANE
    full = address + pitch * LANE.astype(np.uint64)
    m.state.vgpr[8], m.state.vgpr[9] = full & np.uint64(0xFFFFFFFF), full >> np.uint64(32)
    m.state.sgpr[22], m.state.sgpr[23] = address & 0xFFFFFFFF, address >> 32
    if kind == "buffer":
        m.state.sgpr[24:28, 0] = [address & 0xFFFFFFFF, address >> 32, 256, 0x27000]
    for part in range(4):
        m.state.vgpr[10 + part, 0] = 0x01010101 * LANE + (part << 28)
    m.state.sgpr[126], m.state.sgpr[127] = ENABLED, 0
    m.state.lanes[0] = LANE < 16
    m.run(10)
    m.memory.finish()
    return m, data


LOADS = {
    "ubyte": (1, False), "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True),
    "dword": (4, False), "dwordx2": (8, False), "dwordx3": (12, False), "dwordx4": (16, False),
}  # fmt: skip
DS_LOADS = {
    "u8": (1, False), "i8": (1, True), "u16": (2, False), "i16": (2, True), "b32": (4, False), "b64": (8, False),
    "b96": (12, False), "b128": (16, False),
}  # fmt: skip


def registers(first: int, size: int) -> str:
    """Return the operand for `size` bytes."""
    return f"v{first}" if size <= 4 else f"v[{first}:{first + size // 4 - 1}]"


def forms(name: str, size: int, *, store: bool) -> list[tuple[str, str, int]]:
    """Return (line, kind, extra offset) of the ways to address memory."""
    data = registers(10 if store else 0, size)
    order = "v[8:9], {d}" if store else "{d}, v[8:9]"
    based = "v6, {d}, s[22:23]" if store else "{d}, v6, s[22:23]"
    lines = [
        (f"global_{name} {order}, off", "global", 0),
        (f"global_{name} {order}, off offset:16 nt", "global", 16),
        (f"global_{name} {based} offset:32", "global", 32),
        (f"flat_{name} {order}", "flat", 0),
        (f"buffer_{name} {{d}}, v6, s[24:27], 0 offen", "buffer", 0),
        (f"buffer_{name} {{d}}, v6, s[24:27], 0 offen offset:16", "buffer", 16),
    ]
    return [(line.replace("{d}", data), kind, offset) for line, kind, offset in lines]


@pytest.mark.parametrize("name", LOADS)
def test_loads(name: str) -> None:
    size, sext = LOADS[name]
    pitch = min(size, 8)
    for line, kind, offset in forms(f"load_{name}", size, store=False):
        m, _ = launch(line, pitch=pitch, kind=kind)
        for lane in range(16):
            for part in range(max(1, size // 4)):
                want = at(pitch * lane + offset + 4 * part, min(size, 4), sext=sext)
                assert int(m.state.vgpr[part, 0, lane]) == want, (line, lane)
        assert (m.state.vgpr[0, 0, 16:] == OLD).all()


STORES = {
    "byte": (1, 0), "byte_d16_hi": (1, 16), "short": (2, 0), "short_d16_hi": (2, 16), "dword": (4, 0),
    "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0),
}  # fmt: skip
DS_STORES = {
    "b8": (1, 0), "b8_d16_hi": (1, 16), "b16": (2, 0), "b16_d16_hi": (2, 16), "b32": (4, 0), "b64": (8, 0),
    "b96": (12, 0), "b128": (16, 0),
}  # fmt: skip


def stored(lane: int, size: int, shift: int) -> bytes:
    """Return the bytes that a lane stores from v10 on."""
    words = [(0x01010101 * lane + (part << 28)) & 0xFFFFFFFF for part in range(4)]
    return (sum(w << 32 * i for i, w in enumerate(words)) >> shift).to_bytes(16, "little")[:size]


@pytest.mark.parametrize("name", STORES)
def test_stores(name: str) -> None:
    size, shift = STORES[name]
    pitch = min(size, 12)
    for line, kind, offset in forms(f"store_{name}", size, store=True):
        _, data = launch(line, pitch=pitch, kind=kind)
        want = DATA.copy()
        for lane in range(16):
            start = pitch * lane + offset
            want[start : start + size] = np.frombuffer(stored(lane, size, shift), np.uint8)
        assert data.tolist() == want.tolist(), line


@pytest.mark.parametrize("size", [1, 2])
def test_transposed_lds_reads(size: int) -> None:
    """Lane 16 g + i, element j: element i % n of what lane 16 g + (16 / n) j + i / n reads, of n in 8 bytes.

    Rows lie anywhere: here in reverse.
    """
    m = machine([f"ds_read_b64_tr_b{8 * size} v[0:1], v6 offset:64"], lds=1024)
    data = np.random.default_rng(0).integers(0, 256, 1024, np.uint8)
    m.lds.bytes[:] = data
    address = 8 * (63 - LANE)
    m.state.vgpr[6] = address
    m.run(10)
    got = np.ascontiguousarray(m.state.vgpr[0:2, 0].T).view(np.uint8).reshape(64, -1, size)
    count = 8 // size
    for lane in range(64):
        base, part, element = lane // 16 * 16, lane % 16 // count, lane % count
        for j in range(count):
            at = 64 + address[base + 16 // count * j + part] + size * element
            assert got[lane, j].tolist() == data[at : at + size].tolist()


@pytest.mark.parametrize("fault", ["lanes", "alignment"])
def test_transposed_lds_reads_refuse(fault: str) -> None:
    m = machine(["ds_read_b64_tr_b8 v[0:1], v6"], lds=1024)
    m.state.vgpr[6] = 8 * LANE + (4 if fault == "alignment" else 0)
    if fault == "lanes":
        m.state.lanes[0] = LANE < 16
    with pytest.raises(Gfx950Error, match="transposed read"):
        m.run(10)


@pytest.mark.parametrize("name", DS_LOADS)
def test_lds_reads(name: str) -> None:
    size, sext = DS_LOADS[name]
    m, _ = launch(f"ds_read_{name} {registers(0, size)}, v6 offset:3", pitch=8, kind="lds")
    for lane in range(16):
        for part in range(max(1, size // 4)):
            assert int(m.state.vgpr[part, 0, lane]) == at(8 * lane + 3 + 4 * part, min(size, 4), sext=sext)


@pytest.mark.parametrize("name", DS_STORES)
def test_lds_writes(name: str) -> None:
    size, shift = DS_STORES[name]
    m, _ = launch(f"ds_write_{name} v6, {registers(10, size)} offset:3", pitch=12, kind="lds")
    want = DATA.copy()
    for lane in range(16):
        want[12 * lane + 3 : 12 * lane + 3 + size] = np.frombuffer(stored(lane, size, shift), np.uint8)
    assert m.lds.bytes[0].tolist() == want.tolist()


@pytest.mark.parametrize(
    ("size", "name", "unit"), [(4, "2", 4), (8, "2", 8), (4, "2st64", 256), (8, "2st64", 512)]
)
def test_lds_pairs(size: int, name: str, unit: int) -> None:
    first, second = registers(10, size), registers(12, size)
    offsets = "offset1:3" if unit < 256 else "offset0:1 offset1:3"
    m = machine(
        [
            f"ds_write{name}_b{8 * size} v6, {first}, {second} {offsets}",
            f"ds_read{name}_b{8 * size} v[0:{size // 2 - 1}], v6 {offsets}",
        ],
        lds=8192,
    )  # fmt: skip
    m.state.vgpr[6] = (size if unit >= 256 else 8 * size) * LANE
    for part in range(4):
        m.state.vgpr[10 + part] = 1000 * part + LANE
    m.run(10)
    parts = [0, 1, 2, 3] if size == 8 else [0, 2]
    for i, part in enumerate(parts):
        assert m.state.vgpr[i, 0].tolist() == (1000 * part + LANE).tolist()
    base = unit if unit >= 256 else 0
    assert m.lds.bytes[0, base : base + 4].view(np.uint32)[0] == 0


@pytest.mark.parametrize("words", [1, 2, 4, 8, 16])
def test_scalar_loads(words: int) -> None:
    name = "s_load_dword" + (f"x{words}" if words > 1 else "")
    target = "s40" if words == 1 else f"s[40:{39 + words}]"
    for extra in ("0x10", "s27 offset:0x10"):
        m = machine([f"{name} {target}, s[22:23], {extra}"])
        data = DATA.copy()
        address = m.memory.add(data)
        m.state.sgpr[22], m.state.sgpr[23], m.state.sgpr[27] = address & 0xFFFFFFFF, address >> 32, 0
        m.run(10)
        want = DATA[16 : 16 + 4 * words].view(np.uint32).tolist()
        assert m.state.sgpr[40 : 40 + words, 0].tolist() == want


@pytest.mark.parametrize("returns", [False, True])
def test_atomic_addition(returns: bool) -> None:
    """Sixteen lanes add to four words, the last of them across the sign; lanes that are off add nothing."""
    line = "global_atomic_add v6, v10, s[22:23] offset:4"
    if returns:
        line = line.replace("v6", "v0, v6") + " sc0"
    m = machine([line])
    data = np.array([7, 0, 100, 0, 0xFFFFFFFE, 9], np.uint32)
    address = m.memory.add(data)
    m.state.sgpr[22], m.state.sgpr[23] = address & 0xFFFFFFFF, address >> 32
    m.state.vgpr[0], m.state.vgpr[6], m.state.vgpr[10] = OLD, 4 * (LANE % 4), LANE + 1
    m.state.sgpr[126], m.state.sgpr[127] = ENABLED, 0
    m.state.lanes[0] = LANE < 16
    m.run(10)
    m.memory.finish()
    sums = [sum(lane + 1 for lane in range(16) if lane % 4 == word) for word in range(4)]
    start = [0, 100, 0, 0xFFFFFFFE]
    assert data.tolist() == [7, *((s + x) % 2**32 for s, x in zip(start, sums, strict=True)), 9]
    for lane in range(64):
        earlier = sum(other + 1 for other in range(lane % 4, lane, 4))
        want = (start[lane % 4] + earlier) % 2**32 if returns and lane < 16 else OLD
        assert int(m.state.vgpr[0, 0, lane]) == want


def test_atomic_maximum() -> None:
    """Of integers with a sign; lanes that are off change nothing."""
    m = machine(["global_atomic_smax v6, v10, s[22:23]"])
    data = np.array([-5, 100, -7, 2**31 - 1], np.int32)
    address = m.memory.add(data)
    m.state.sgpr[22], m.state.sgpr[23] = address & 0xFFFFFFFF, address >> 32
    m.state.vgpr[6], m.state.vgpr[10] = (
        4 * (LANE % 4),
        np.where(LANE % 4 == 2, -(LANE + 1) & 0xFFFFFFFF, LANE),
    )
    m.state.sgpr[126], m.state.sgpr[127] = ENABLED, 0
    m.state.lanes[0] = LANE < 16
    m.run(10)
    m.memory.finish()
    assert data.tolist() == [12, 100, -3, 2**31 - 1]


def test_buffer_bounds_are_per_word() -> None:
    """Words behind num_records read 0 and are not stored; the check knows nothing of the array behind it."""
    for line in (
        "buffer_load_dwordx2 v[0:1], v6, s[24:27], s28 offen",
        "buffer_store_dwordx2 v[10:11], v6, s[24:27], s28 offen",
    ):
        m = machine([line])
        data = DATA.copy()
        address = m.memory.add(data)
        m.state.sgpr[24:28, 0] = [address & 0xFFFFFFFF, address >> 32, 64, 0x27000]
        m.state.sgpr[28] = 8
        m.state.vgpr[6] = np.where(LANE < 8, 8 * LANE - 4 * (LANE == 6), 0x80000000)
        m.state.vgpr[10], m.state.vgpr[11] = 1, 2
        m.state.lanes[0] = (LANE > 3) & (LANE < 10)
        m.run(10)
        m.memory.finish()
        if "load" in line:
            assert m.state.vgpr[1, 0, 4:10].tolist() == [at(44, 4), at(52, 4), at(56, 4), 0, 0, 0]
            assert m.state.vgpr[0, 0, 4:10].tolist() == [at(40, 4), at(48, 4), at(52, 4), 0, 0, 0]
        else:
            assert data[:40].tolist() == DATA[:40].tolist()
            assert data[64:].tolist() == DATA[64:].tolist()
            assert data[40:64].view(np.uint32).tolist() == [1, 2, 1, 1, 2, at(60, 4)]


@pytest.mark.parametrize(("name", "size"), [("dword", 4), ("dwordx3", 12), ("dwordx4", 16)])
def test_loads_into_the_lds(name: str, size: int) -> None:
    """The lanes lie side by side from M0 on, one behind the bounds as zeros; what lanes that are off own stays."""
    line = f"buffer_load_{name} v6, s[24:27], 0 offen offset:16 lds"
    m = machine(["s_mov_b32 m0, s20", "s_nop 0", line], lds=2048)
    address = m.memory.add(DATA.copy())
    m.state.sgpr[20] = 64
    m.state.sgpr[24:28, 0] = [address & 0xFFFFFFFF, address >> 32, 256, 0x27000]
    m.state.vgpr[6] = np.where(LANE == 9, 0x80000000, 8 * (15 - LANE))
    m.state.lanes[0] = (LANE > 3) & (LANE < 16)
    m.run(10)
    want = np.full(2048, 0xA5, np.uint8)
    for lane in range(4, 16):
        from_here = 16 + 8 * (15 - lane)
        there = slice(80 + size * lane, 80 + size * lane + size)
        want[there] = 0 if lane == 9 else DATA[from_here : from_here + size]
    assert m.lds.bytes[0].tolist() == want.tolist()
    with pytest.raises(Gfx950Error, match="reads m0 right after .*s_nop 0 is missing"):
        machine(["s_mov_b32 m0, s20", line])


@pytest.mark.parametrize(("offset", "ok"), [(0, True), (252, True), (253, False), (-1, False), (256, False)])
def test_accesses_outside_an_array_raise(offset: int, ok: bool) -> None:
    m = machine(["global_load_dword {d}, v6, s[22:23]"])
    address = m.memory.add(DATA.copy()) + offset
    m.state.sgpr[22], m.state.sgpr[23] = address & 0xFFFFFFFF, address >> 32
    m.state.vgpr[6] = 0
    if ok:
        m.run(10)
    else:
        with pytest.raises(Gfx950Error, match=r"global_load_dword v0, v6.*access of 4 bytes at offset"):
            m.run(10)


def test_other_wrong_addresses_raise() -> None:
    m = machine(["global_load_dword {d}, v6, s[22:23]"])
    m.memory.add(DATA.copy())
    m.state.sgpr[22:24], m.state.vgpr[6] = 0x1000, 0
    with pytest.raises(Gfx950Error, match="where no buffer is"):
        m.run(10)
    m = machine(["ds_read_b32 {d}, v6"], lds=64)
    m.state.vgpr[6] = 61
    with pytest.raises(Gfx950Error, match="LDS access of 4 bytes at 61"):
        m.run(10)


def test_an_array_that_is_two_arguments_is_one_buffer() -> None:
    m = machine(["global_store_dword v6, {a}, s[22:23]", "global_load_dword {d}, v6, s[24:25]"])
    data = DATA.copy()
    first, second = m.memory.add(data), m.memory.add(data)
    assert first == second
    m.state.sgpr[22], m.state.sgpr[23] = m.state.sgpr[24], m.state.sgpr[25] = first & 0xFFFFFFFF, first >> 32
    m.state.vgpr[2], m.state.vgpr[6] = 0x12345678, 8
    m.run(10)
    m.memory.finish()
    assert int(m.state.vgpr[0, 0, 0]) == 0x12345678
    assert data[8:12].view(np.uint32)[0] == 0x12345678


def test_read_only_buffers_and_memory_shared_in_part_are_refused() -> None:
    m = machine(["global_store_dword v6, {a}, s[22:23]"])
    address = m.memory.add(DATA.copy(), writable=False)
    m.state.sgpr[22], m.state.sgpr[23], m.state.vgpr[6] = address & 0xFFFFFFFF, address >> 32, 0
    with pytest.raises(Gfx950Error, match="read-only"):
        m.run(10)
    data = DATA.copy()
    m.memory.add(data)
    for part, writable in ((data[8:], True), (data[:-8], True), (data, False)):
        with pytest.raises(Gfx950Error, match="share part of their memory"):
            m.memory.add(part, writable=writable)


def test_a_changed_guard_is_reported() -> None:
    m = machine(["s_nop 0"])
    m.memory.add(DATA.copy())
    m.memory.buffers[0].bytes[-1] = 0
    with pytest.raises(Gfx950Error, match="guard bytes"):
        m.memory.finish()
