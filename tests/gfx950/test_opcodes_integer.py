"""Integer vector instructions: sources and results worked out by hand from the ISA's definitions."""

import pytest

from gfx950.bench import OLD, f16, f32, vector

pytestmark = pytest.mark.study

M = 0xFFFFFFFF
HIGH = OLD << 32
"""What stays in the register above a 32-bit result."""

# line: (sources..., result)
CASES = {
    "v_mov_b32_e32 {d}, {a}": [(0, 0), (M, M), (f32(-0.0), f32(-0.0))],
    "v_mov_b32_e32 {d}, 0.5": [(0, 0x3F000000)],
    "v_mov_b32_e32 {d}, 0.15915494": [(0, 0x3E22F983)],
    "v_mov_b32_e32 {d}, -16": [(0, 0xFFFFFFF0)],
    "v_mov_b32_e32 {d}, 0x12345678": [(0, 0x12345678)],
    "v_mov_b64_e32 {D}, {A}": [(0x123456789ABCDEF0, 0x123456789ABCDEF0)],
    "v_mov_b64_e32 {D}, -1": [(0, (1 << 64) - 1)],
    "v_not_b32_e32 {d}, {a}": [(0, M), (0x0F0F0F0F, 0xF0F0F0F0)],
    "v_bfrev_b32_e32 {d}, {a}": [(1, 0x80000000), (0x00000006, 0x60000000), (0x12345678, 0x1E6A2C48)],
    "v_ffbh_u32_e32 {d}, {a}": [(0, M), (0x800000FF, 0), (0x100000FF, 3), (0xFFFF, 16), (1, 31), (M, 0)],
    "v_ffbl_b32_e32 {d}, {a}": [(0, M), (0xFF000001, 0), (0xFF000008, 3), (0xFFFF0000, 16), (0x80000000, 31)],
    "v_bcnt_u32_b32 {d}, {a}, {b}": [(0, 5, 5), (M, 1, 33), (0xCCCCCCCC, M, 15)],
    "v_prng_b32_e32 {d}, {a}": [(1, 2), (0x80000000, 197), (M, 0xFFFFFFFE ^ 197), (0x40000001, 0x80000002)],
    "v_and_b32_e32 {d}, {a}, {b}": [(0b1100, 0b1010, 0b1000)],
    "v_or_b32_e32 {d}, {a}, {b}": [(0b1100, 0b1010, 0b1110)],
    "v_xor_b32_e32 {d}, {a}, {b}": [(0b1100, 0b1010, 0b0110)],
    "v_xnor_b32_e32 {d}, {a}, {b}": [(0b1100, 0b1010, 0xFFFFFFF9)],
    "v_bfm_b32 {d}, {a}, {b}": [(4, 8, 0xF00), (0, 5, 0), (32, 0, 0), (31, 1, 0xFFFFFFFE), (36, 40, 0xF00)],
    "v_lshlrev_b32_e32 {d}, {a}, {b}": [(4, 1, 16), (32, 1, 1), (33, 1, 2), (31, 3, 0x80000000)],
    "v_lshrrev_b32_e32 {d}, {a}, {b}": [(4, 0x80000000, 0x08000000), (32, 7, 7), (63, 0x80000000, 1)],
    "v_ashrrev_i32_e32 {d}, {a}, {b}": [(4, 0x80000000, 0xF8000000), (31, 0x7FFFFFFF, 0), (35, 0xFFFFFFF0, 0xFFFFFFFE)],
    "v_lshlrev_b64 {D}, {a}, {B}": [(32, 1, 1 << 32), (64, 5, 5), (63, 3, 1 << 63), (1, 0x80000000, 1 << 32)],
    "v_lshrrev_b64 {D}, {a}, {B}": [(32, 1 << 63, 1 << 31), (64, 5, 5), (4, 0x1_0000_0000, 0x10000000)],
    "v_ashrrev_i64 {D}, {a}, {B}": [(4, 1 << 63, 0xF8 << 56), (63, 1 << 63, (1 << 64) - 1), (64, 9, 9)],
    "v_lshl_add_u64 {D}, {A}, {b}, {C}": [
        (1, 3, 0xFFFFFFFF, 0x100000007), ((1 << 64) - 1, 0, 1, 0), (1 << 61, 7, 5, 5), (3, 8, 1, 4),
    ],
    "v_lshl_add_u64 {D}, {A}, 2, -1": [(1 << 31, 0, 0, 0x1FFFFFFFF)],
    "v_add_u32_e32 {d}, {a}, {b}": [(M, 2, 1), (1, 2, 3)],
    "v_sub_u32_e32 {d}, {a}, {b}": [(1, 2, M), (0, 0x80000000, 0x80000000)],
    "v_subrev_u32_e32 {d}, {a}, {b}": [(1, 2, 1), (2, 1, M)],
    "v_add_u32_e64 {d}, {a}, {b} clamp": [(M, 2, M), (1, 2, 3)],
    "v_sub_u32_e64 {d}, {a}, 1 clamp": [(0, 0), (5, 4)],
    "v_subrev_u32_e64 {d}, {a}, {b} clamp": [(2, 1, 0), (1, 5, 4)],
    "v_add_i32 {d}, {a}, {b} clamp": [(0x7FFFFFFF, 1, 0x7FFFFFFF), (0x80000000, M, 0x80000000)],
    "v_sub_i32 {d}, {a}, {b} clamp": [(0x80000000, 1, 0x80000000), (0, 0x80000000, 0x7FFFFFFF)],
    "v_add_u16_e64 {d}, {a}, {b} clamp": [(0xABCDFFFF, 0x12340002, 0xFFFF)],
    "v_sub_u16_e64 {d}, {a}, {b} clamp": [(1, 2, 0)],
    "v_sub_i16 {d}, {a}, {b} clamp": [(0x8000, 1, 0xDEAD8000)],
    "v_add_i32 {d}, {a}, {b}": [(0x7FFFFFFF, 1, 0x80000000)],
    "v_sub_i32 {d}, {a}, {b}": [(0x80000000, 1, 0x7FFFFFFF)],
    "v_mul_lo_u32 {d}, {a}, {b}": [(0x10001, 0x10001, 0x20001), (M, M, 1)],
    "v_mul_hi_u32 {d}, {a}, {b}": [(M, M, 0xFFFFFFFE), (0x80000000, 2, 1), (0xD2511F53, 2, 1), (0xFFFF, 0xFFFF, 0)],
    "v_mul_hi_i32 {d}, {a}, {b}": [(M, M, 0), (0x80000000, 0x80000000, 0x40000000), (M, 2, M)],
    "v_mul_u32_u24_e32 {d}, {a}, {b}": [(0xFF000003, 0xAB000005, 15), (0xFFFFFF, 0xFFFFFF, 0xFE000001)],
    "v_mul_hi_u32_u24_e32 {d}, {a}, {b}": [(0xFFFFFF, 0xFFFFFF, 0xFFFF), (0xFF000003, 5, 0)],
    "v_mul_i32_i24_e32 {d}, {a}, {b}": [(0x00FFFFFF, 5, 0xFFFFFFFB), (0x800000, 2, 0xFF000000)],
    "v_mul_hi_i32_i24_e32 {d}, {a}, {b}": [(0x00FFFFFF, 5, M), (0x800000, 0x800000, 0x4000)],
    "v_mad_u32_u24 {d}, {a}, {b}, {c}": [(0xFF000003, 5, 7, 22)],
    "v_mad_i32_i24 {d}, {a}, {b}, {c}": [(0x00FFFFFF, 5, 7, 2)],
    "v_mad_u32_u16 {d}, {a}, {b}, {c}": [(0x1FFFF, 0xFFFF, 1, 0xFFFE0002)],
    "v_add3_u32 {d}, {a}, {b}, {c}": [(M, M, 3, 1), (1, 2, 3, 6)],
    "v_xad_u32 {d}, {a}, {b}, {c}": [(0b1100, 0b1010, M, 0b0101)],
    "v_lshl_add_u32 {d}, {a}, {b}, {c}": [(3, 4, 5, 53), (3, 36, 5, 53), (0x80000000, 1, 9, 9)],
    "v_add_lshl_u32 {d}, {a}, {b}, {c}": [(3, 4, 5, 224), (M, 2, 33, 2)],
    "v_lshl_or_b32 {d}, {a}, {b}, {c}": [(3, 4, 5, 0x35), (3, 36, 5, 0x35)],
    "v_and_or_b32 {d}, {a}, {b}, {c}": [(0b1100, 0b1010, 1, 0b1001)],
    "v_or3_b32 {d}, {a}, {b}, {c}": [(1, 2, 4, 7)],
    "v_bfi_b32 {d}, {a}, {b}, {c}": [(0xFF00FF00, 0x12345678, 0xABCDEF01, 0x12CD5601)],
    "v_bfe_u32 {d}, {a}, {b}, {c}": [(0x12345678, 8, 8, 0x56), (M, 0, 0, 0), (M, 4, 31, 0x0FFFFFFF), (0xF0, 36, 35, 7)],
    "v_bfe_i32 {d}, {a}, {b}, {c}": [
        (0x80, 4, 4, 0xFFFFFFF8), (0x70, 4, 4, 7), (M, 5, 0, 0), (0x80000000, 28, 8, 0xFFFFFFF8),
            (0x7FFFFFFF, 0, 31, M),
    ],
    "v_alignbit_b32 {d}, {a}, {b}, {c}": [
        (0x12345678, 0x9ABCDEF0, 4, 0x89ABCDEF), (1, 2, 0, 2), (1, 0, 32, 0), (1, 0, 31, 2), (1, 0, 33, 0x80000000),
    ],
    "v_alignbyte_b32 {d}, {a}, {b}, {c}": [(0x12345678, 0x9ABCDEF0, 1, 0x789ABCDE), (1, 2, 4, 2)],
    "v_perm_b32 {d}, {a}, {b}, {c}": [
        (0x77665544, 0x33221100, 0x07050301, 0x77553311),
        (0x77665544, 0x33221100, 0x00020406, 0x00224466),
        (0x80FF7F00, 0x80FF7F00, 0x0B0A0908, 0xFF00FF00),
        (0, 0, 0x0C0D0EFF, 0x00FFFFFF),
    ],
    "v_sad_u32 {d}, {a}, {b}, {c}": [(3, 5, 1, 3), (0, M, 0, M), (M, 0, 1, 0)],
    "v_cvt_pk_u16_u32 {d}, {a}, {b}": [(5, 0x10000, 0xFFFF0005), (M, 7, 0x7FFFF)],
    "v_cvt_pk_i16_i32 {d}, {a}, {b}": [(0x8000, 0xFFFF0000, 0x80007FFF), (M, 5, 0x5FFFF)],
    "v_pack_b32_f16 {d}, {a}, {b}": [(0xAAAA1234, 0xBBBB5678, 0x56781234)],
    "v_pack_b32_f16 {d}, {a}, {b} op_sel:[1,0,0]": [(0xAAAA1234, 0xBBBB5678, 0x5678AAAA)],
    # 16-bit results: old instructions clear the upper half, those that are new in GFX9 keep it.
    "v_add_u16_e32 {d}, {a}, {b}": [(0xABCDFFFF, 0x12340002, 1)],
    "v_sub_u16_e32 {d}, {a}, {b}": [(1, 2, 0xFFFF)],
    "v_subrev_u16_e32 {d}, {a}, {b}": [(1, 2, 1)],
    "v_mul_lo_u16_e32 {d}, {a}, {b}": [(0x101, 0x1FF, 0x00FF)],
    "v_lshlrev_b16_e32 {d}, {a}, {b}": [(4, 0xF00F, 0x00F0), (16, 3, 3)],
    "v_lshrrev_b16_e32 {d}, {a}, {b}": [(4, 0xABCDF00F, 0x0F00), (17, 3, 1)],
    "v_ashrrev_i16_e32 {d}, {a}, {b}": [(4, 0x8000, 0xF800), (20, 0x8000, 0xF800)],
    "v_min_u16_e32 {d}, {a}, {b}": [(0xFFFF, 1, 1)],
    "v_max_u16_e32 {d}, {a}, {b}": [(0xFFFF, 1, 0xFFFF)],
    "v_min_i16_e32 {d}, {a}, {b}": [(0xFFFF, 1, 0xFFFF)],
    "v_max_i16_e32 {d}, {a}, {b}": [(0xFFFF, 1, 1)],
    "v_mad_legacy_u16 {d}, {a}, {b}, {c}": [(0x102, 0x201, 3, 0x0505)],
    "v_add_i16 {d}, {a}, {b}": [(0x7FFF, 1, 0xDEAD8000)],
    "v_sub_i16 {d}, {a}, {b}": [(0x8000, 1, 0xDEAD7FFF)],
    "v_mad_u16 {d}, {a}, {b}, {c}": [(0x102, 0x201, 3, 0xDEAD0505)],
    "v_mad_u16 {d}, {a}, {b}, {c} op_sel:[0,1,0,1]": [(3, 0x00050001, 1, 0x0010BEEF)],
    "v_min3_u16 {d}, {a}, {b}, {c}": [(9, 0xFFFF, 3, 0xDEAD0003)],
    "v_max3_u16 {d}, {a}, {b}, {c}": [(9, 0xFFFF, 3, 0xDEADFFFF)],
    "v_med3_u16 {d}, {a}, {b}, {c}": [(9, 0xFFFF, 3, 0xDEAD0009)],
    "v_min3_i16 {d}, {a}, {b}, {c}": [(9, 0xFFFF, 3, 0xDEADFFFF)],
    "v_max3_i16 {d}, {a}, {b}, {c}": [(9, 0xFFFF, 3, 0xDEAD0009)],
    "v_med3_i16 {d}, {a}, {b}, {c}": [(9, 0xFFFF, 3, 0xDEAD0003)],
    "v_min_u32_e32 {d}, {a}, {b}": [(M, 1, 1)],
    "v_max_u32_e32 {d}, {a}, {b}": [(M, 1, M)],
    "v_min_i32_e32 {d}, {a}, {b}": [(M, 1, M)],
    "v_max_i32_e32 {d}, {a}, {b}": [(M, 1, 1)],
    "v_min3_u32 {d}, {a}, {b}, {c}": [(9, M, 3, 3)],
    "v_max3_u32 {d}, {a}, {b}, {c}": [(9, M, 3, M)],
    "v_med3_u32 {d}, {a}, {b}, {c}": [(9, M, 3, 9), (3, 9, M, 9), (M, 3, 9, 9), (5, 5, 1, 5)],
    "v_min3_i32 {d}, {a}, {b}, {c}": [(9, M, 3, M)],
    "v_max3_i32 {d}, {a}, {b}, {c}": [(9, M, 3, 9)],
    "v_med3_i32 {d}, {a}, {b}, {c}": [(9, M, 3, 3)],
    # Bit {a, b, c} of the table: 0xE8 is the majority, 0x96 the parity, 0xCA selects b or c by a.
    "v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0xe8": [(0b11110000, 0b11001100, 0b10101010, 0b11101000)],
    "v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0x96": [(0b11110000, 0b11001100, 0b10101010, 0b10010110)],
    "v_bitop3_b32 {d}, {a}, {b}, {c} bitop3:0xca": [(0xFF00FF00, 0x12345678, 0xABCDEF01, 0x12CD5601)],
    "v_bitop3_b16 {d}, {a}, {b}, {c} bitop3:0xe8": [(0xF0, 0xCC, 0xAA, 0xDEAD00E8)],
    # Byte and word selections; the rest of the destination is cleared or kept.
    "v_or_b32_sdwa {d}, {a}, {b} dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_2": [
        (0xFFFF0001, 0x00AB0000, 0x00AB0000),
    ],
    "v_or_b32_sdwa {d}, {a}, {b} dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:BYTE_0": [
        (0x00120000, 0xFFFFFF01, 0xDEAD13EF),
    ],
    "v_add_u16_sdwa {d}, {a}, {b} dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD": [
        (0xFFFF0000, 2, 0x00010000),
    ],
    "v_add_u32_sdwa {d}, sext({a}), {b} dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:WORD_0": [
        (0x80, 0xAAAA0001, 0xFFFFFF81),
    ],
    "v_lshlrev_b32_sdwa {d}, {a}, {b} dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_3": [
        (4, 0xAB000000, 0xAB0),
    ],
    # Packed halves.
    "v_pk_add_u16 {d}, {a}, {b}": [(0xFFFF0001, 0x00020003, 0x00010004)],
    "v_pk_add_u16 {d}, {a}, {b} op_sel:[1,0] op_sel_hi:[0,1]": [(0x00050001, 0x00200010, 0x00210015)],
    "v_pk_add_u16 {d}, {a}, -1 op_sel_hi:[1,0]": [(0x00050001, 0, 0x00040000)],
    "v_pk_add_i16 {d}, {a}, {b}": [(0x7FFF0001, 0x00010001, 0x80000002)],
    "v_pk_sub_u16 {d}, {a}, {b}": [(0x00010005, 0x00020003, 0xFFFF0002)],
    "v_pk_sub_i16 {d}, {a}, {b}": [(0x80000005, 0x00010006, 0x7FFFFFFF)],
    "v_pk_min_u16 {d}, {a}, {b}": [(0xFFFF0005, 0x00010003, 0x00010003)],
    "v_pk_max_u16 {d}, {a}, {b}": [(0xFFFF0005, 0x00010003, 0xFFFF0005)],
    "v_pk_min_i16 {d}, {a}, {b}": [(0xFFFF0005, 0x00010003, 0xFFFF0003)],
    "v_pk_max_i16 {d}, {a}, {b}": [(0xFFFF0005, 0x00010003, 0x00010005)],
    "v_pk_mad_u16 {d}, {a}, {b}, {c}": [(0x00020003, 0x00050007, 0x00010001, 0x000B0016)],
    "v_pk_mad_i16 {d}, {a}, {b}, {c}": [(0xFFFF0003, 0x00050007, 0x00010001, 0xFFFC0016)],
    "v_pk_mul_lo_u16 {d}, {a}, {b}": [(0x01000003, 0x01010007, 0x01000015)],
    "v_pk_lshlrev_b16 {d}, {a}, {b}": [(0x00040011, 0x000F8001, 0x00F00002)],
    "v_pk_lshrrev_b16 {d}, {a}, {b}": [(0x00040011, 0x00F08001, 0x000F4000)],
    "v_pk_ashrrev_i16 {d}, {a}, {b}": [(0x00040001, 0x80008000, 0xF800C000)],
    "v_swap_b32 {d}, {a}": [(5, 5)],
    "v_cvt_f32_ubyte0_e32 {d}, {a}": [(0x01020380, f32(128))],
    "v_cvt_f32_ubyte1_e32 {d}, {a}": [(0x01020380, f32(3))],
    "v_cvt_f32_ubyte2_e32 {d}, {a}": [(0x01FF0380, f32(255))],
    "v_cvt_f32_ubyte3_e32 {d}, {a}": [(0x01020380, f32(1))],
    "v_cvt_f32_bf16_e32 {d}, {a}": [(0xFFFF3F80, f32(1)), (0x0001, 0x10000), (f16(0), 0)],
}  # fmt: skip


@pytest.mark.parametrize("line", CASES)
def test_integer_instruction(line: str) -> None:
    wide = "{D}" in line
    want = [case[-1] if wide else case[-1] | HIGH for case in CASES[line]]
    assert [hex(v) for v in vector(line, [case[:-1] for case in CASES[line]])] == [hex(v) for v in want]
