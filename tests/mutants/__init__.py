"""Faulty backends, one planted fault each: the conformance suite must catch every one and name the clause it breaks.

Each fault was found in a real stack, or is one that is easily made; `source` says where or how.
"""

from __future__ import annotations

from mutants.element_faults import ELEMENT_MUTANTS
from mutants.fused_faults import FUSED_MUTANTS
from mutants.layout_faults import LAYOUT_MUTANTS
from mutants.misleading_faults import BLAME_MUTANTS
from mutants.mutant import Mutant
from mutants.mxfp8_faults import MXFP8_MUTANTS
from mutants.nvfp4_faults import NVFP4_MUTANTS
from mutants.random_faults import RANDOM_MUTANTS
from mutants.run_faults import RUN_MUTANTS
from mutants.scale_faults import SCALE_MUTANTS
from mutants.size_faults import SIZE_MUTANTS
from mutants.stored_faults import STORED_MUTANTS
from mutants.transform_faults import TRANSFORM_MUTANTS

MUTANTS: tuple[Mutant, ...] = (
    *SCALE_MUTANTS, *ELEMENT_MUTANTS, *LAYOUT_MUTANTS, *RANDOM_MUTANTS, *TRANSFORM_MUTANTS, *STORED_MUTANTS,
    *FUSED_MUTANTS, *SIZE_MUTANTS, *BLAME_MUTANTS, *MXFP8_MUTANTS, *NVFP4_MUTANTS, *RUN_MUTANTS,
)  # fmt: skip
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
