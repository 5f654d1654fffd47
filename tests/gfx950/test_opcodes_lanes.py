"""Instructions that move data between lanes, or that read and write lane masks."""

import numpy as np
import pytest

from gfx950.bench import OLD, f32, machine
from gfx950.errors import Gfx950Error
from gfx950.machine import Machine

pytestmark = pytest.mark.study

LANE = np.arange(64)
M = 0xFFFFFFFF


def run(line: str, *, exec_mask: int = (1 << 64) - 1, lds: int = 0) -> Machine:
    """Execute with v2 = 100 + lane and v4 = 200 + lane."""
    m = machine([line], lds=lds)
    m.state.vgpr[0], m.state.vgpr[2], m.state.vgpr[4] = OLD, 100 + LANE, 200 + LANE
    m.state.lanes[0] = [exec_mask >> i & 1 == 1 for i in range(64)]
    m.state.sgpr[126], m.state.sgpr[127] = exec_mask & M, exec_mask >> 32
    m.run(10)
    return m


def row(*first: int | None) -> list[int]:
    """Return what 64 lanes hold if each row of 16 holds what the first does; None is the old content."""
    return [OLD if x is None else 100 + x + r for r in (0, 16, 32, 48) for x in first]


ALL = "row_mask:0xf bank_mask:0xf"
DPP = {
    f"quad_perm:[1,0,3,2] {ALL}": row(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14),
    f"quad_perm:[0,0,0,0] {ALL}": row(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12),
    f"row_shl:1 {ALL}": row(*range(1, 16), None),
    f"row_shr:2 {ALL}": row(None, None, *range(14)),
    f"row_ror:4 {ALL}": row(12, 13, 14, 15, *range(12)),
    f"row_mirror {ALL}": row(*range(15, -1, -1)),
    f"row_half_mirror {ALL}": row(*range(7, -1, -1), *range(15, 7, -1)),
    f"row_newbcast:5 {ALL}": row(*[5] * 16),
    f"row_bcast:15 {ALL}": [OLD] * 16 + [115] * 16 + [131] * 16 + [147] * 16,
    f"row_bcast:31 {ALL}": [OLD] * 32 + [131] * 32,
    "row_bcast:15 row_mask:0xa bank_mask:0xf": [OLD] * 16 + [115] * 16 + [OLD] * 16 + [147] * 16,
    "row_bcast:31 row_mask:0xc bank_mask:0xf": [OLD] * 32 + [131] * 32,
    f"wave_shl:1 {ALL}": [*range(101, 164), OLD],
    f"wave_shr:1 {ALL}": [OLD, *range(100, 163)],
    f"wave_rol:1 {ALL}": [*range(101, 164), 100],
    f"wave_ror:1 {ALL}": [163, *range(100, 163)],
    "quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0x5": row(0, 1, 2, 3, *[None] * 4, 8, 9, 10, 11, *[None] * 4),
    f"row_shr:1 {ALL} bound_ctrl:0": [0 if i % 16 == 0 else 99 + i for i in range(64)],
}


@pytest.mark.parametrize("control", DPP)
def test_dpp(control: str) -> None:
    m = run(f"v_mov_b32_dpp {{d}}, {{a}} {control}")
    assert m.state.vgpr[0, 0].tolist() == DPP[control]


def test_dpp_from_a_disabled_lane() -> None:
    odd = sum(1 << i for i in range(1, 64, 2))
    kept = run(f"v_mov_b32_dpp {{d}}, {{a}} quad_perm:[0,0,3,3] {ALL}", exec_mask=odd)
    assert kept.state.vgpr[0, 0, :4].tolist() == [OLD, OLD, OLD, 103]
    zero = run(f"v_mov_b32_dpp {{d}}, {{a}} quad_perm:[0,0,3,3] {ALL} bound_ctrl:0", exec_mask=odd)
    assert zero.state.vgpr[0, 0, :4].tolist() == [OLD, 0, OLD, 103]


def test_dpp_moves_the_first_source_only() -> None:
    m = run(f"v_sub_u32_dpp {{d}}, {{b}}, {{a}} quad_perm:[3,2,1,0] {ALL}")
    assert m.state.vgpr[0, 0, :4].tolist() == [103, 101, 99, 97]


def test_lane_to_scalar() -> None:
    m = run("v_readfirstlane_b32 {s}, {a}", exec_mask=0b11000)
    assert int(m.state.sgpr[20, 0]) == 103
    assert int(run("v_readfirstlane_b32 {s}, {a}", exec_mask=0).state.sgpr[20, 0]) == 100
    assert int(run("v_readlane_b32 {s}, {a}, 37", exec_mask=0).state.sgpr[20, 0]) == 137
    assert int(run("v_readlane_b32 {s}, {a}, 64").state.sgpr[20, 0]) == 100


def test_scalar_to_lane() -> None:
    m = run("v_writelane_b32 {d}, 7, 3", exec_mask=0)
    assert m.state.vgpr[0, 0].tolist() == [OLD] * 3 + [7] + [OLD] * 60


@pytest.mark.parametrize(("size", "line"), [(16, "v_permlane16_swap_b32"), (32, "v_permlane32_swap_b32")])
def test_lane_swaps(size: int, line: str) -> None:
    m = run(f"{line} {{a}}, {{b}}")
    a, b = (100 + LANE).reshape(-1, 2, size), (200 + LANE).reshape(-1, 2, size)
    want_a = np.stack([a[:, 0], b[:, 0]], axis=1).ravel()
    want_b = np.stack([a[:, 1], b[:, 1]], axis=1).ravel()
    assert m.state.vgpr[2, 0].tolist() == want_a.tolist()
    assert m.state.vgpr[4, 0].tolist() == want_b.tolist()
    with pytest.raises(Gfx950Error, match="disabled lanes"):
        run(f"{line} {{a}}, {{b}}", exec_mask=1)


def test_register_swap() -> None:
    m = run("v_swap_b32 {a}, {b}", exec_mask=1)
    assert (m.state.vgpr[2, 0, :2].tolist(), m.state.vgpr[4, 0, :2].tolist()) == ([200, 101], [100, 201])


def test_lane_numbers() -> None:
    m = machine(["v_mbcnt_lo_u32_b32 {d}, -1, 0", "v_mbcnt_hi_u32_b32 {d}, -1, {d}"])
    m.run(10)
    assert m.state.vgpr[0, 0].tolist() == LANE.tolist()


@pytest.mark.parametrize(
    ("line", "want"), [("v_accvgpr_write_b32 a3, {a}", 100), ("v_accvgpr_write_b32 a3, 5", 5)]
)
def test_accumulation_registers(line: str, want: int) -> None:
    m = machine([line, "v_accvgpr_mov_b32 a4, a3", "v_accvgpr_read_b32 {d}, a4"])
    m.state.vgpr[2] = 100
    m.run(10)
    assert (m.state.vgpr[0] == want).all()


def with_masks(line: str, a: int, b: int, *, mask: int = 0) -> Machine:
    """Execute on two numbers with a mask in s[22:23]."""
    m = machine([line])
    m.state.vgpr[2], m.state.vgpr[4] = a, b
    m.state.sgpr[22], m.state.sgpr[23] = mask & M, mask >> 32
    m.run(10)
    return m


def test_selection_by_a_mask() -> None:
    m = with_masks("v_cndmask_b32_e64 {d}, {a}, {b}, {T}", 1, 2, mask=0b10)
    assert m.state.vgpr[0, 0, :3].tolist() == [1, 2, 1]
    m = with_masks("v_cndmask_b32_e64 {d}, 0, -|{b}|, {T}", 1, f32(2), mask=0b10)
    assert m.state.vgpr[0, 0, :2].tolist() == [0, f32(-2)]


@pytest.mark.parametrize(
    ("name", "a", "b", "carry_in", "want", "carry"),
    [
        ("v_add_co_u32", M, 1, 0, 0, 1), ("v_add_co_u32", M, 0, 0, M, 0),
        ("v_sub_co_u32", 0, 1, 0, M, 1), ("v_sub_co_u32", 1, 1, 0, 0, 0),
        ("v_subrev_co_u32", 1, 0, 0, M, 1), ("v_subrev_co_u32", 0, 1, 0, 1, 0),
        ("v_addc_co_u32", M, M, 1, M, 1), ("v_addc_co_u32", M, 0, 1, 0, 1), ("v_addc_co_u32", 1, 1, 0, 2, 0),
        ("v_subb_co_u32", 0, M, 1, 0, 1), ("v_subb_co_u32", 5, 3, 1, 1, 0), ("v_subb_co_u32", 0, 0, 1, M, 1),
        ("v_subbrev_co_u32", 3, 5, 1, 1, 0), ("v_subbrev_co_u32", 1, 0, 0, M, 1),
    ],
)  # fmt: skip
def test_carries(name: str, a: int, b: int, carry_in: int, want: int, carry: int) -> None:
    takes = ", {T}" if name in ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32") else ""
    m = with_masks(f"{name}_e64 {{d}}, {{S}}, {{a}}, {{b}}{takes}", a, b, mask=((1 << 64) - 1) * carry_in)
    assert int(m.state.vgpr[0, 0, 5]) == want
    assert int(m.state.sgpr[20, 0]) == M * carry


@pytest.mark.parametrize(
    ("line", "a", "b", "c", "want", "carry"),
    [
        ("v_mad_u64_u32 {D}, {S}, {a}, {b}, {C}", M, M, 5, M * M + 5, 0),
        ("v_mad_u64_u32 {D}, {S}, {a}, {b}, {C}", M, M, (1 << 64) - 1, M * M - 1, 1),
        ("v_mad_u64_u32 {D}, {S}, {a}, {b}, 0", 0xD2511F53, 0x12345678, 0, 0xD2511F53 * 0x12345678, 0),
        ("v_mad_i64_i32 {D}, {S}, {a}, {b}, {C}", M, 2, 1, (1 << 64) - 1, 1),
        ("v_mad_i64_i32 {D}, {S}, {a}, {b}, {C}", M, M, 1, 2, 0),
        ("v_mad_i64_i32 {D}, {S}, {a}, {b}, {C}", 1, 1, (1 << 63) - 1, 1 << 63, 0),
    ],
)
def test_wide_products(line: str, a: int, b: int, c: int, want: int, carry: int) -> None:
    m = machine([line])
    m.state.vgpr[2], m.state.vgpr[4], m.state.vgpr[6], m.state.vgpr[7] = a, b, c & M, c >> 32
    m.run(10)
    assert int(m.state.vgpr[0, 0, 0]) | int(m.state.vgpr[1, 0, 0]) << 32 == want
    assert int(m.state.sgpr[20, 0]) == M * carry


def test_accumulating_product() -> None:
    m = machine(["v_fmac_f32_e32 {d}, {a}, {b}"])
    m.state.vgpr[0], m.state.vgpr[2], m.state.vgpr[4] = f32(-1), f32(3), f32(2)
    m.run(10)
    assert int(m.state.vgpr[0, 0, 0]) == f32(5)


SWIZZLES = {
    "swizzle(QUAD_PERM,3,2,1,0)": LANE ^ 3,
    "swizzle(SWAP,8)": LANE ^ 8,
    "swizzle(REVERSE,16)": LANE // 16 * 16 + 15 - LANE % 16,
    "swizzle(BROADCAST,4,2)": LANE // 4 * 4 + 2,
    'swizzle(BITMASK_PERM,"0pi1p")': LANE // 32 * 32 + (LANE & 9) + (4 - (LANE & 4)) + 2,
}


@pytest.mark.parametrize("mode", SWIZZLES)
def test_swizzle(mode: str) -> None:
    m = run(f"ds_swizzle_b32 {{d}}, {{a}} offset:{mode}")
    assert m.state.vgpr[0, 0].tolist() == (100 + SWIZZLES[mode]).tolist()


def test_pull_and_push() -> None:
    for name, source in (("ds_bpermute_b32", (LANE + 5) % 64), ("ds_permute_b32", (LANE - 5) % 64)):
        m = machine([f"{name} {{d}}, {{c}}, {{a}} offset:4"])
        m.state.vgpr[2], m.state.vgpr[6] = 100 + LANE, 4 * (LANE + 4) + 0x10000
        m.run(10)
        assert m.state.vgpr[0, 0].tolist() == (100 + source).tolist()


def test_pull_from_a_disabled_lane_gives_zero() -> None:
    m = machine(["s_mov_b64 exec, 3", "ds_bpermute_b32 {d}, {c}, {a}"])
    m.state.vgpr[2], m.state.vgpr[6] = 100 + LANE, 4 * (LANE + 1)
    m.run(10)
    assert m.state.vgpr[0, 0, :2].tolist() == [101, 0]
