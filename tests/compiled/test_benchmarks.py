"""Benchmarks measure the compiled router beside the plain one."""

import subprocess
import sys

import pytest

from routing.schema import LowestCostSettings
from tests.benchmarks import builds
from tests.benchmarks.router import our_router
from tests.compiled.package import ROOT, CannotCompileError, environment, runs_compiled

QUICK = "from tests.benchmarks import __main__, path; path.ROUNDS = 2; __main__.main(['path'])"


@pytest.mark.timeout(1800)  # the first test that needs the compiled router waits for it
@pytest.mark.usefixtures("compiled")
def test_a_benchmark_of_the_compiled_router_prints_so_and_runs_once():
    command = [sys.executable, "-c", QUICK]
    process = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)

    assert [line for line in process.stdout.splitlines() if line.startswith("==")] == ["== path, compiled"]
    assert process.stdout.count("8 KiB chat request") == 2


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_measured_router_is_the_build_that_its_row_names(tmp_path, is_compiled):
    with our_router(tmp_path, [9], LowestCostSettings(), environment() if is_compiled else None) as router:
        assert runs_compiled(router.pid) == is_compiled
    assert router.name == "lowest_cost" + ", compiled" * is_compiled


def test_a_message_says_why_the_router_cannot_be_compiled(monkeypatch, capsys):
    def refuse() -> None:
        raise CannotCompileError("The router cannot be compiled here: it needs a C compiler.")

    monkeypatch.setattr(builds, "compile_router", refuse)
    builds.compiled_environment.cache_clear()
    builds.run_compiled("path", ())
    builds.compiled_environment.cache_clear()

    assert capsys.readouterr().out == "The router cannot be compiled here: it needs a C compiler.\n"
