"""Benchmarks measure the compiled router beside the plain one."""

import subprocess
import sys

import pytest

from routing.schema import LowestCostSettings
from tests.benchmarks import builds
from tests.benchmarks.router import our_router
from tests.compiled.package import ROOT, CannotCompileError, environment, runs_compiled

QUICK = "from tests.benchmarks import __main__, path; path.ROUNDS = 2; __main__.main(['path'])"


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("compiled")
def test_what_runs_in_one_process_says_that_it_was_compiled_and_runs_once():
    command = [sys.executable, "-c", QUICK]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)

    assert [line for line in done.stdout.splitlines() if line.startswith("==")] == ["== path, compiled"]
    assert done.stdout.count("8 KiB chat request") == 2


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("compiled_too", [False, True])
def test_a_router_that_is_measured_is_the_one_that_its_row_names(tmp_path, compiled_too):
    with our_router(tmp_path, [9], LowestCostSettings(), environment() if compiled_too else None) as router:
        assert runs_compiled(router.pid) == compiled_too
    assert router.name == "lowest_cost" + ", compiled" * compiled_too


def test_where_nothing_can_be_compiled_a_line_says_why(monkeypatch, capsys):
    def refuse() -> None:
        raise CannotCompileError("The router cannot be compiled here: it needs a C compiler.")

    monkeypatch.setattr(builds, "compile_router", refuse)
    builds.compiled_environment.cache_clear()
    builds.again_compiled("path", ())
    builds.compiled_environment.cache_clear()

    assert capsys.readouterr().out == "The router cannot be compiled here: it needs a C compiler.\n"
