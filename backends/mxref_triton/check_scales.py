"""Checks how the scaled matrix instruction reads scale bytes: `python -m mxref_triton.check_scales`.

Prints a line for each tile of the GEMM. The exit code is 0 if all pass, 1 if one fails, 2 if there is no gfx950.
"""

from __future__ import annotations

import sys

import torch

from mxref_triton.lane.gfx950 import is_gfx950
from mxref_triton.launch import DEVICE, INTERPRETED
from mxref_triton.products.matrix_cores import TILES
from mxref_triton.products.scale_bytes import first_wrong_scale, on_device


def main() -> int:
    """Run the check and return the exit code."""
    gpu = torch.device(DEVICE)
    if INTERPRETED or not is_gfx950(gpu):
        print("needs a gfx950 GPU, and there is none: nothing was checked", file=sys.stderr)
        return 2
    failed = False
    for tile in TILES:
        wrong = first_wrong_scale(on_device(gpu, tile))
        failed |= wrong is not None
        right = "scale bytes are powers of two, 255 is NaN, for MXFP4, MXFP8 and both together"
        print(f"{'FAIL' if wrong else 'pass'}  tile {tile.rows} x {tile.columns}: {wrong or right}")
    if failed:
        print('recipes with gemm = "bounded" need MXREF_TRITON_BOUNDED=ordered on this card')
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
