"""Ranks keep the memory that a step frees."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import sys
import numpy as np
from miniray.train.workers import process as launching

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    parts = [np.ones(1_000_000, np.uint8) for _ in range(8)]
    parts.reverse()  # what lies at the end of the heap goes first, and is given back at once
    while parts:
        parts.pop()

if sys.argv[1] == "keep":
    launching.keep_freed_memory()
step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is of glibc")
def test_freed_memory_is_used_again_without_the_kernel():
    found = {}
    for how in ("keep", "plain"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, how],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found[how] = int(done.stdout)
    assert found["keep"] < min(100, found["plain"])  # 10 times 8 MB are 20,000 pages of 4 KB
