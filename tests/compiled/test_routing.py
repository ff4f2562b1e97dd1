"""The router's tests pass on the compiled router."""

import os
import re
import subprocess
import sys

import pytest

from tests.compiled.package import ONLY_COMPILED, ROOT

MAX_S = 1500.0  # including compilation, while other tests run; alone it takes 3 minutes
MIN_TESTS = 3000 if ONLY_COMPILED in os.environ else 1500  # all cases, or some of each test


@pytest.mark.timeout(MAX_S)
@pytest.mark.usefixtures("compiled")
def test_the_tests_of_the_router_pass_on_the_compiled_router():
    command = [sys.executable, "-m", "tests.compiled", "-q", "-n", "2", "--maxfail=20"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=MAX_S - 60)

    assert process.returncode == 0, process.stdout[-20_000:] + process.stderr[-2000:]
    passed = re.search(r"(\d+) passed", process.stdout)
    assert passed, process.stdout
    assert int(passed[1]) > MIN_TESTS
