"""Large blocks that are freed leave the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The first free raises glibc's threshold: large blocks after it come from the heap, with small ones behind them.
PROGRAM = """
import sys
from pathlib import Path
from routing.process import return_large_blocks
if sys.argv[1] == "told":
    return_large_blocks()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
first = bytes([1]) * (30 << 20)
del first
before = resident()
pairs = [(bytes([2]) * (3 << 19), bytes([3]) * 5000) for _ in range(20)]
small = [pair[1] for pair in pairs]
del pairs
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_large_blocks_leave_no_holes() -> None:
    def kept(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout)

    assert kept("told") < 2 << 20
    assert kept("not told") > 20 << 20, "or there is nothing to tell any more"
