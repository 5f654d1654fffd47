"""Golden vectors without Python: the rule of generated inputs."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from vector_files import VECTORS

from mxref import MxrefError
from mxref.reference import backend as reference
from mxref.vectors import (
    load_vectors,
)
from mxref.vectors.data import InputRule, generated_bits, input_words, words_text
from mxref.vectors.run import run_record


def compiled(source: Path, out: Path) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, str(source), "-o", str(out), "-lm"], check=True, timeout=60)
    return out


def test_input_rule_of_the_readme_in_c(tmp_path):
    (block,) = re.findall(r"```c\n(.*?)```", (VECTORS / "README.md").read_text(), re.DOTALL)
    source = tmp_path / "inputs.c"
    source.write_text(
        """#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static void philox(uint32_t c[4], uint32_t k[2], uint32_t out[4]) {
    for (int i = 0; i < 10; i++) {
        uint64_t p = (uint64_t)0xD2511F53 * c[0], q = (uint64_t)0xCD9E8D57 * c[2];
        uint32_t high0 = (uint32_t)(q >> 32) ^ c[1] ^ k[0], high1 = (uint32_t)(p >> 32) ^ c[3] ^ k[1];
        uint32_t next[4] = {high0, (uint32_t)q, high1, (uint32_t)p};
        memcpy(c, next, sizeof next);
        k[0] += 0x9E3779B9; k[1] += 0xBB67AE85;
    }
    memcpy(out, c, 16);
}
"""
        + block
        + """
int main(int argc, char **argv) {
    if (argc < 5) return 2;
    uint64_t seed = strtoull(argv[1], NULL, 16), count = strtoull(argv[4], NULL, 10);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t base = (uint32_t)strtoul(argv[3], NULL, 10);
        uint32_t w = strcmp(argv[2], "words") ? input_bits(argv[2], base, seed, i) : input_word(seed, base, i);
        printf("%s%08" PRIx32, i ? " " : "", w);
    }
}
"""
    )
    program = compiled(source, tmp_path / "inputs")

    def c_words(rule: str, base: int, seed: int) -> str:
        args = [str(program), f"{seed:x}", rule, str(base), "3001"]
        return subprocess.run(args, capture_output=True, text=True, check=True, timeout=60).stdout

    for seed in (0, 0xFEDCBA9876543210):
        assert c_words("words", 3, seed) == words_text(input_words(seed, 3, 3001))
        for rule, base in (
            (InputRule.RAW, 0),
            (InputRule.FINITE, 0),
            (InputRule.WINDOW, 118),
            (InputRule.GRID, 247),
            (InputRule.LADDER, 0),
        ):
            assert c_words(rule.value, base, seed) == words_text(generated_bits(rule, base, seed, 3001))


def test_generated_inputs_are_what_their_rules_say():
    n = 31 * 32 * 4
    exponent = {r: generated_bits(r, 100, 7, n) >> 23 & 255 for r in InputRule}
    assert (exponent[InputRule.RAW] == 255).any()
    assert (exponent[InputRule.FINITE] < 255).all()
    assert set(exponent[InputRule.WINDOW]) == set(exponent[InputRule.GRID]) == set(range(100, 108))
    assert set(exponent[InputRule.LADDER]) == set(range(248))
    assert (generated_bits(InputRule.GRID, 100, 7, n) & 0x7FFFF == 0).all()
    with pytest.raises(MxrefError):
        run_record(
            replace(
                load_vectors("quantize")[-1], inputs={"rule": "floor", "rounding": "rne", "x_seed": "0" * 16}
            ),
            reference,
        )
