"""The router's tests pass on the compiled router."""

import re
import subprocess
import sys

import pytest

from tests.compiled.package import ROOT

MOST_S = 900.0  # compiling included, beside the rest of the suite
FEWEST = 2000  # tests that have to do with what is compiled


@pytest.mark.timeout(MOST_S)
@pytest.mark.usefixtures("compiled")
def test_what_holds_of_the_plain_router_holds_of_the_compiled_one():
    command = [sys.executable, "-m", "tests.compiled", "-q", "-n", "2", "--timeout=60", "--maxfail=20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=MOST_S - 60)

    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > FEWEST
