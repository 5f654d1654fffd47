"""A whole program from its text: arguments, workgroups, preloading, and launches that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from gfx950.errors import Gfx950Error
from gfx950.machine import run_compiled

pytestmark = pytest.mark.study

TEXT = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
	.text
	.globl	add
	.p2align	8
	.type	add,@function
add:                                    ; @add
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_load_dwordx2 s[4:5], s[0:1], 0x8
	s_waitcnt lgkmcnt(0)
	s_branch .LBB0_0
	.p2align	8
; %bb.1:
.LBB0_0:
	v_lshl_add_u32 v0, s6, 7, v0            // 128 threads a workgroup
	v_cmp_gt_u32_e32 vcc, s4, v0
	s_and_saveexec_b64 s[8:9], vcc
	s_cbranch_execz .LBB0_1
	v_lshlrev_b32_e32 v1, 2, v0
	global_load_dword v2, v1, s[2:3]
	s_waitcnt vmcnt(0)
	v_add_f32_e32 v2, s5, v2
	global_store_dword v1, v2, s[2:3]
.LBB0_1:
	s_endpgm
	.section	.rodata,"a",@progbits
	.amdhsa_kernel add
		.amdhsa_group_segment_fixed_size 0
		.amdhsa_private_segment_fixed_size 0
		.amdhsa_user_sgpr_count 6
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_user_sgpr_kernarg_preload_length 4
		.amdhsa_user_sgpr_kernarg_preload_offset 0
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_system_sgpr_workgroup_id_y 0
		.amdhsa_system_sgpr_workgroup_id_z 0
		.amdhsa_next_free_vgpr 4
		.amdhsa_accum_offset 4
		.amdhsa_float_denorm_mode_32 3
		.amdhsa_float_denorm_mode_16_64 3
		.amdhsa_ieee_mode 1
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
      - .offset:         12
        .size:           4
        .value_kind:     by_value
      - .address_space:  global
        .offset:         16
        .size:           8
        .value_kind:     global_buffer
    .group_segment_fixed_size: 0
    .max_flat_workgroup_size: 128
    .name:           add
"""


@pytest.mark.parametrize("preload", [True, False])
def test_a_launch(preload: bool) -> None:
    x = np.arange(300, dtype=np.float32)
    run = run_compiled(TEXT, (3,), [x, 290, 0.5], 2, preload=preload)
    assert x.tolist() == [*(np.arange(290) + 0.5), *range(290, 300)]
    assert run.waves == 6
    assert run.steps < 40, "all waves execute an instruction together"


def test_a_launch_that_asks_for_every_pointer() -> None:
    """The arguments' pointer comes behind those of the dispatch and of the queue, the dispatch's number behind it."""
    text = TEXT.replace("s6, 7", "s12, 7").replace("s[2:3]", "s[8:9]").replace("s4, v0", "s10, v0")
    text = text.replace("s[4:5]", "s[10:11]").replace("s[0:1]", "s[4:5]").replace("s5, v2", "s11, v2")
    text = text.replace("s_and_saveexec_b64 s[8:9]", "s_and_saveexec_b64 s[14:15]")
    asked = "".join(
        f"\t\t.amdhsa_user_sgpr_{name} 1\n" for name in ("dispatch_ptr", "queue_ptr", "dispatch_id")
    )
    text = text.replace("user_sgpr_count 6\n", f"user_sgpr_count 12\n{asked}")
    x = np.arange(300, dtype=np.float32)
    run_compiled(text, (3,), [x, 290, 0.5], 2)
    assert x.tolist() == [*(np.arange(290) + 0.5), *range(290, 300)]
    with pytest.raises(Gfx950Error, match=r"global_load_dword .*where no buffer is"):
        run_compiled(text.replace("v2, v1, s[8:9]", "v2, v1, s[0:1]"), (3,), [x, 290, 0.5], 2)


@pytest.mark.parametrize(
    ("text", "args", "warps", "reason"),
    [
        (TEXT, [np.zeros(4, np.float32), 4], 2, r"argument 2 \(by_value, 4 bytes\) is missing"),
        (TEXT, [np.zeros(4, np.float32), 4, 1.0, None, 5], 2, "5 arguments for a kernel that takes 4"),
        (TEXT, [np.zeros(4, np.float32), 4, np.zeros(1)], 2, "argument 2 takes 4 bytes, got 8"),
        (TEXT, [np.zeros(4, np.float32), 4, 1.0], 4, "4 waves asked for, the text has workgroups of 128"),
        (TEXT, [np.zeros((4, 4), np.float32)[:, 0], 4, 1.0], 2, "must be contiguous"),
        (
            TEXT,
            [np.zeros(4, np.float32), 5, 1.0],
            2,
            "line 20: global_load_dword .* at offset 16 of a buffer of 16",
        ),
        (TEXT.replace("ieee_mode 1", "ieee_mode 0"), [], 2, ".amdhsa_ieee_mode 0 is not modelled"),
        (
            TEXT.replace("\t\t.amdhsa_ieee_mode", "\t\t.amdhsa_fp16_overflow 1\n\t\t.amdhsa_ieee_mode"),
            [],
            2,
            ".amdhsa_fp16_overflow 1 is not modelled",
        ),
        (
            TEXT.replace("v_add_f32_e32", "v_log_f32_e32"),
            [None, 0, 1.0],
            2,
            "line 22: .*v_log_f32 is not modelled",
        ),
        (TEXT.replace("add:  ", "\t.type\tb,@function\nadd:  "), [], 2, "a second function b"),
        (TEXT.replace("\ts_waitcnt vmcnt(0)", "\t.long 5"), [], 2, "directive '.long 5' inside the code"),
    ],
)
def test_refused_launches(text: str, args: list[object], warps: int, reason: str) -> None:
    with pytest.raises(Gfx950Error, match=reason):
        run_compiled(text, (1,), args, warps)  # type: ignore[arg-type]


def test_workgroups_along_three_axes() -> None:
    text = TEXT.replace("workgroup_id_y 0", "workgroup_id_y 1").replace(
        "workgroup_id_z 0", "workgroup_id_z 1"
    )
    text = text.replace("v_add_f32_e32 v2, s5, v2", "v_mov_b32_e32 v2, s8")
    text = text.replace("s[8:9], vcc", "s[10:11], vcc").replace("s6, 7, v0", "s7, 7, v0")
    x = np.zeros(256, np.float32)
    run_compiled(text, (2, 2, 3), [x, 256, 0.0], 2)
    # s6, s7, s8 are x, y and z; the last workgroup to write has z = 2, and y chooses the half.
    assert (x.view(np.uint32) == 2).all()
