"""A run on a CPU keeps the memory of freed arrays: the next ones need no page of the system."""

import json
import platform
import subprocess
import sys

import pytest

pytest.importorskip("torch")

FAULTS = """
import json
import resource
import torch
from mxref_training.device import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        arrays = [torch.zeros(5 << 20) for _ in range(4)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
found = [faults()]
keep_freed_memory()
faults()
print(json.dumps([*found, faults()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a C library without mallopt")
def test_freed_memory_is_kept_for_the_next_arrays():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert after < 100 < before
