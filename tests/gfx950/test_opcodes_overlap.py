"""Instructions whose result lies over their own sources, wholly or in part: all are read before any is written."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950.bench import f16, f32, f64, machine
from gfx950.errors import Gfx950Error
from gfx950.machine import Machine

pytestmark = pytest.mark.study

M = 0xFFFFFFFF
ONE, TWO, THREE, FOUR = (f32(x) for x in (1, 2, 3, 4))
FP4 = "op_sel_hi:[0,0,0] cbsz:4 blgp:4"


def run(line: str, before: dict[str, int], *, lds: int = 0) -> Machine:
    """Execute with registers such as v2, s20 or a4, the same in every lane."""
    m = machine([line], lds=lds)
    for name, value in before.items():
        getattr(m.state, {"v": "vgpr", "s": "sgpr", "a": "agpr"}[name[0]])[int(name[1:])] = value
    m.run(10)
    return m


def after(m: Machine, *names: str) -> list[int]:
    """Return the registers of lane 7."""
    found = []
    for name in names:
        number = int(name[1:])
        found.append(int(m.state.sgpr[number, 0] if name[0] == "s" else m.state.vgpr[number, 0, 7]))
    return found


# v0 to v3 hold zeros, A and B; the addend is 1, 2, 3, 4.
ADDENDS = {
    "v_mfma_f32_16x16x32_fp8_fp8 v[6:9], v[0:1], v[2:3], v[4:7]": 4,
    "v_mfma_f32_16x16x32_fp8_fp8 v[4:7], v[0:1], v[2:3], v[6:9]": 6,
    "v_mfma_f32_16x16x16_bf16 v[10:13], v[0:1], v[2:3], v[8:11]": 8,
    f"v_mfma_scale_f32_16x16x128_f8f6f4 v[12:15], v[0:3], v[0:3], v[10:13], v0, v0 {FP4}": 10,
    f"v_mfma_scale_f32_16x16x128_f8f6f4 v[12:15], v[0:3], v[0:3], v[12:15], v0, v0 {FP4}": 12,
}


@pytest.mark.parametrize("line", ADDENDS)
def test_an_addend_over_the_result(line: str) -> None:
    """Compilers leave such registers to results of four; only the overlap differs between these."""
    first = ADDENDS[line]
    zeros = {f"v{i}": 0 for i in range(4)}
    m = run(line, zeros | {f"v{first + i}": value for i, value in enumerate((ONE, TWO, THREE, FOUR))})
    result = int(line.split("[")[1].split(":")[0])
    assert after(m, *(f"v{result + i}" for i in range(4))) == [ONE, TWO, THREE, FOUR]


def test_an_addend_over_the_result_in_accumulation_registers() -> None:
    zeros = {f"v{i}": 0 for i in range(4)}
    held = {f"a{2 + i}": value for i, value in enumerate((ONE, TWO, THREE, FOUR))}
    m = run("v_mfma_f32_16x16x32_fp8_fp8 a[4:7], v[0:1], v[2:3], a[2:5]", zeros | held)
    assert m.state.agpr[4:8, 0, 7].tolist() == [ONE, TWO, THREE, FOUR]


def test_factors_under_the_result() -> None:
    """Sixteen products of 1 and 2, in every register of the result."""
    m = run(
        "v_mfma_f32_16x16x16_f16 v[0:3], v[0:1], v[2:3], 0",
        {"v0": f16(1) * 0x10001, "v1": f16(1) * 0x10001, "v2": f16(2) * 0x10001, "v3": f16(2) * 0x10001},
    )
    assert after(m, "v0", "v1", "v2", "v3") == [f32(32)] * 4


@pytest.mark.parametrize(
    "line",
    [
        "v_mfma_f32_32x32x8_f16 v[16:31], v[0:1], v[2:3], v[14:29]",
        "v_mfma_f32_32x32x8_f16 v[16:31], v[16:17], v[2:3], v[16:31]",
        f"v_mfma_scale_f32_32x32x64_f8f6f4 v[16:31], v[0:3], v[30:33], 0, v0, v0 {FP4}",
    ],
)
def test_results_of_sixteen_registers_may_lie_over_no_source_in_part(line: str) -> None:
    """They are written while sources are still read; the addend may be the very same registers."""
    zeros = {f"v{i}": 0 for i in range(64)}
    with pytest.raises(Gfx950Error, match="lies over a source"):
        run(line, zeros)


# line: registers before, those after
OVERLAPS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    # Packed: the halves are exchanged, so each result lies where the other's source was.
    "v_pk_add_f32 v[0:1], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]":
        ({"v0": ONE, "v1": TWO, "v2": ONE, "v3": TWO}, {"v0": THREE, "v1": THREE}),
    "v_pk_mul_f32 v[0:1], v[0:1], v[0:1] op_sel:[1,1] op_sel_hi:[0,0]":
        ({"v0": THREE, "v1": TWO}, {"v0": FOUR, "v1": f32(9)}),
    "v_pk_fma_f32 v[0:1], v[2:3], v[2:3], v[0:1] op_sel:[0,0,1] op_sel_hi:[0,0,0]":
        ({"v0": ONE, "v1": TWO, "v2": ONE, "v3": 0}, {"v0": THREE, "v1": TWO}),
    "v_pk_mov_b32 v[0:1], v[0:1], v[0:1] op_sel:[1,0]": ({"v0": 5, "v1": 6}, {"v0": 6, "v1": 5}),
    "v_pk_add_f16 v0, v0, v0 op_sel:[1,1] op_sel_hi:[0,0]":
        ({"v0": f16(1) | f16(3) << 16}, {"v0": f16(6) | f16(2) << 16}),
    # Pairs: the upper half depends on the lower one of a source, or the lower on the upper.
    "v_lshl_add_u64 v[0:1], v[0:1], 1, v[0:1]": ({"v0": 1 << 31, "v1": 2}, {"v0": 1 << 31, "v1": 7}),
    "v_lshlrev_b64 v[0:1], v0, v[0:1]": ({"v0": 4, "v1": 1}, {"v0": 64, "v1": 16}),
    "v_lshrrev_b64 v[0:1], v1, v[0:1]": ({"v0": 0, "v1": 4}, {"v0": 1 << 30, "v1": 0}),
    "v_ashrrev_i64 v[0:1], v1, v[0:1]": ({"v0": 0, "v1": 33}, {"v0": 16, "v1": 0}),
    "v_mad_u64_u32 v[0:1], s[20:21], v0, v1, v[0:1]": ({"v0": M, "v1": M}, {"v0": 0, "v1": M - 1, "s20": M}),
    "v_mad_i64_i32 v[0:1], s[20:21], v1, v0, v[0:1]": ({"v0": M, "v1": 5}, {"v0": M - 5, "v1": 5, "s20": 0}),
    "v_cvt_f64_f32 v[0:1], v0": ({"v0": THREE}, {"v0": f64(3) & M, "v1": f64(3) >> 32}),
    "v_cvt_f64_i32 v[0:1], v0": ({"v0": M}, {"v0": f64(-1) & M, "v1": f64(-1) >> 32}),
    "v_cvt_f64_u32 v[0:1], v1": ({"v1": M}, {"v0": f64(M) & M, "v1": f64(M) >> 32}),
    "v_cvt_f32_f64 v0, v[0:1]": ({"v0": f64(0.1) & M, "v1": f64(0.1) >> 32}, {"v0": f32(0.1)}),
    "v_cvt_scalef32_pk_f32_fp4 v[0:1], v0, v1": ({"v0": 0x72, "v1": TWO}, {"v0": TWO, "v1": f32(12)}),
    "v_cvt_scalef32_pk_f32_fp4 v[0:1], v1, v0": ({"v1": 0x72, "v0": TWO}, {"v0": TWO, "v1": f32(12)}),
    "v_cvt_scalef32_pk_fp4_f32 v0, v0, v1, v2": ({"v0": f32(6), "v1": ONE, "v2": ONE}, {"v0": f32(6) & ~0xFF | 0x27}),
    # Scalar: SCC, carries and masks are of what the sources held.
    "s_add_u32 s20, s20, s20": ({"s20": (1 << 31) + 1}, {"s20": 2, "scc": 1}),
    "s_sub_u32 s20, s22, s20": ({"s20": 5, "s22": 3}, {"s20": M - 1, "scc": 1}),
    "s_add_i32 s20, s20, s20": ({"s20": 1 << 30}, {"s20": 1 << 31, "scc": 1}),
    "s_lshl1_add_u32 s20, s20, s20": ({"s20": 1 << 31}, {"s20": 1 << 31, "scc": 1}),
    "s_min_u32 s20, s20, s22": ({"s20": 3, "s22": 5}, {"s20": 3, "scc": 1}),
    "s_max_i32 s20, s22, s20": ({"s20": 3, "s22": 5}, {"s20": 5, "scc": 1}),
    "s_lshl_b64 s[20:21], s[20:21], s20": ({"s20": 4, "s21": 1}, {"s20": 64, "s21": 16}),
    "s_bfm_b64 s[20:21], s20, s21": ({"s20": 4, "s21": 40}, {"s20": 0, "s21": 0xF00}),
    "s_bfe_u64 s[20:21], s[20:21], s21": ({"s20": 0, "s21": 0x80028}, {"s20": 0, "s21": 0}),
    "s_cselect_b64 s[20:21], 0, s[20:21]": ({"s20": 4, "s21": 5}, {"s20": 4, "s21": 5}),
    "s_and_saveexec_b64 s[20:21], s[20:21]": ({"s20": 0x80, "s21": 0}, {"s20": M, "s21": M, "s126": 0x80, "s127": 0}),
    "v_addc_co_u32_e64 v0, s[20:21], v0, v0, s[20:21]": ({"v0": 1 << 31, "s20": M, "s21": M}, {"v0": 1, "s20": M}),
    "v_subb_co_u32_e64 v0, s[20:21], v1, v0, s[20:21]": ({"v0": 5, "v1": 5, "s20": M, "s21": M}, {"v0": M, "s20": M}),
    "v_fmac_f32_e32 v0, v0, v0": ({"v0": TWO}, {"v0": f32(6)}),
    "v_swap_b32 v0, v1": ({"v0": 3, "v1": 4}, {"v0": 4, "v1": 3}),
}  # fmt: skip


@pytest.mark.parametrize("line", OVERLAPS)
def test_a_result_over_its_sources(line: str) -> None:
    before, want = OVERLAPS[line]
    m = run(line, before)
    assert {n: int(m.state.scc[0]) if n == "scc" else after(m, n)[0] for n in want} == want


# The address is in the first or the last register of what is loaded; DATA has words 0, 1, 2, ...
DATA = np.arange(64, dtype=np.uint32)
LOADS = {
    "global_load_dwordx4 v[8:11], v[8:9], off": 8,
    "global_load_dwordx4 v[6:9], v[8:9], off": 6,
    "flat_load_dwordx2 v[8:9], v[8:9]": 8,
    "global_load_dwordx3 v[4:6], v6, s[22:23]": 4,
    "buffer_load_dwordx4 v[6:9], v6, s[24:27], 0 offen": 6,
    "buffer_load_dwordx4 v[4:7], v6, s[24:27], 0 offen": 4,
    "ds_read_b128 v[6:9], v6": 6,
    "ds_read_b64 v[6:7], v6": 6,
    "ds_read2_b32 v[6:7], v6 offset1:1": 6,
    "ds_read2_b64 v[4:7], v6 offset1:1": 4,
}


@pytest.mark.parametrize("line", LOADS)
def test_a_load_over_its_address(line: str) -> None:
    m = machine([line], lds=256)
    address = m.memory.add(DATA.copy())
    m.lds.bytes[:] = DATA.view(np.uint8)
    m.state.vgpr[6] = 4 * np.arange(64) % 128
    m.state.vgpr[8], m.state.vgpr[9] = (address & M) + m.state.vgpr[6], address >> 32
    m.state.sgpr[22], m.state.sgpr[23] = address & M, address >> 32
    m.state.sgpr[24:28, 0] = [address & M, address >> 32, 256, 0x27000]
    m.run(10)
    first = LOADS[line]
    count = (
        line.count("x4") * 4 or line.count("128") * 4 or line.count("2_b64") * 4 or line.count("x3") * 3 or 2
    )
    assert m.state.vgpr[first : first + count, 0, 7].tolist() == [7 + i for i in range(count)]


SCALAR_LOADS = {
    "s_load_dwordx4 s[20:23], s[22:23], 0x8": (20, 4),
    "s_load_dwordx2 s[22:23], s[22:23], 0x8": (22, 2),
}


def test_scalar_loads_over_their_address() -> None:
    for line, (first, count) in SCALAR_LOADS.items():
        m = machine([line])
        address = m.memory.add(DATA.copy())
        m.state.sgpr[22], m.state.sgpr[23] = address & M, address >> 32
        m.run(10)
        assert m.state.sgpr[first : first + count, 0].tolist() == [2 + i for i in range(count)]


def test_moves_between_lanes_over_their_source() -> None:
    lane = np.arange(64)
    for line, want in (
        ("v_mov_b32_dpp v2, v2 row_ror:1 row_mask:0xf bank_mask:0xf", lane // 16 * 16 + (lane - 1) % 16),
        ("ds_swizzle_b32 v2, v2 offset:swizzle(SWAP,8)", lane ^ 8),
        ("ds_bpermute_b32 v2, v3, v2", (lane + 1) % 64),
        ("ds_bpermute_b32 v3, v3, v2", (lane + 1) % 64),
        ("ds_permute_b32 v2, v3, v2", (lane - 1) % 64),
    ):
        m = machine([line])
        m.state.vgpr[2], m.state.vgpr[3] = lane, 4 * (lane + 1)
        m.run(10)
        assert m.state.vgpr[int(line.split()[1][1]), 0].tolist() == want.tolist(), line


ATOMICS = {
    "global_atomic_add v6, v6, v10, s[22:23] sc0": 6,
    "global_atomic_add v10, v6, v10, s[22:23] sc0": 10,
}


def test_an_atomic_that_returns_over_its_sources() -> None:
    for line, target in ATOMICS.items():
        m = machine([line])
        data = DATA.copy()
        address = m.memory.add(data)
        m.state.sgpr[22], m.state.sgpr[23] = address & M, address >> 32
        m.state.vgpr[6], m.state.vgpr[10] = 4 * np.arange(64), 100
        m.run(10)
        m.memory.finish()
        assert m.state.vgpr[target, 0].tolist() == DATA.tolist(), line
        assert data.tolist() == (DATA + 100).tolist()
