"""Faulty backends, one planted fault each: the conformance suite must catch every one and name the clause it breaks.

Each fault was found in a real stack, or is one that is easily made; `source` says where or how.
"""

from __future__ import annotations

from mutants.blame import BLAME_MUTANTS
from mutants.elements import ELEMENT_MUTANTS
from mutants.fused import FUSED_MUTANTS
from mutants.layout import LAYOUT_MUTANTS
from mutants.mutant import Mutant
from mutants.mxfp8 import MXFP8_MUTANTS
from mutants.randomness import RANDOM_MUTANTS
from mutants.runs import RUN_MUTANTS
from mutants.scales import SCALE_MUTANTS
from mutants.sizes import SIZE_MUTANTS
from mutants.stored import STORED_MUTANTS
from mutants.transform import TRANSFORM_MUTANTS

MUTANTS: tuple[Mutant, ...] = (
    *SCALE_MUTANTS, *ELEMENT_MUTANTS, *LAYOUT_MUTANTS, *RANDOM_MUTANTS, *TRANSFORM_MUTANTS, *STORED_MUTANTS,
    *FUSED_MUTANTS, *SIZE_MUTANTS, *BLAME_MUTANTS, *MXFP8_MUTANTS, *RUN_MUTANTS,
)  # fmt: skip
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
