#!/usr/bin/env python3
"""Installs what a command of the project needs on a fresh machine, then runs the command.

The files of this folder use only the standard library: they run before anything is installed, as root or not.

    python3 deploy/bootstrap.py run | test | check | bench | compile | build | images | audit | clients | lock | sync

Theory of operation. There are three installations, each skipped if its stamp file is current:

1. ``.uv``      the uv installer, from a hash-locked requirement; ``pip install --target`` needs neither
                root nor a virtual environment, and PEP 668 does not apply to it;
2. ``.venv``    the environment, synced to a hash-locked list (``base`` for run, ``dev`` for the rest);
3. a browser    for ``test`` only: one on PATH, else Debian's package (installed as root, otherwise unpacked
                below ``.programs``), else Playwright's own download.

``compile`` builds ``.compiled``, the router as native code, which ``run`` then uses; see ``compiled.py``. ``build``
makes what is published, see ``wheels.py``, and ``images`` the container images, see ``images/README.md``. ``clients``
has an environment of its own, ``.clients``, with the official clients; see ``tests/clients``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from audit import audit_locks
from compiled import COMPILED, CannotCompileError, check_requirements, compile_router, compiled_wheel, is_compiled
from environment import CLIENTS, LOCKS, PYTHON, ROOT, UV, VENV, install, install_uv
from programs import browser, with_programs
from wheels import VERSIONS, build_wheels

MIN_PYTHON = (3, 11)
CANNOT_COMPILE = 3  # exit status on a machine without compiler or packages
MISSING_PYTHON = 4  # exit status of ``build`` without a Python that was asked for
# Programs that tests and benchmarks start, each with the Debian package that contains it.
BENCH_PROGRAMS = {"nginx": "nginx-light", "haproxy": "haproxy", "wrk": "wrk"}
TEST_PROGRAMS = {name: name for name in ("prometheus", "prometheus-alertmanager", "haproxy")}
TEST_PROGRAMS |= {"promtool": "prometheus", "systemd-analyze": "systemd"}

# At least four processes, because the tests of two of them mostly wait for other programs. tests/side_by_side.py
# distributes the tests.
XDIST_OPTIONS = ["-n", str(max(4, min(os.cpu_count() or 1, 8))), "--dist", "loadgroup", "--no-loadscope-reorder"]

LOCK_OPTIONS = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate", "-q"]


def main(arguments: Sequence[str]) -> int:
    """Run the named command and return its exit status."""
    commands = {"run": run, "test": test, "check": check, "bench": bench}
    commands |= {"compile": compile_, "wheel": wheel, "build": build, "images": images, "audit": audit}
    commands |= {"clients": clients, "lock": lock, "sync": sync}
    if not arguments or arguments[0] not in commands:
        print(f"usage: bootstrap.py {' | '.join(commands)}", file=sys.stderr)
        return 2
    if sys.version_info < MIN_PYTHON:
        print(
            f"Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed; this is {sys.version.split()[0]}.",
            file=sys.stderr,
        )
        return 2
    os.chdir(ROOT)
    try:
        return commands[arguments[0]](list(arguments[1:]))
    except CannotCompileError as error:
        print(f"The router cannot be compiled here: {error}", file=sys.stderr)
        return CANNOT_COMPILE
    except subprocess.CalledProcessError as error:
        print(f"\nA step failed with status {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return error.returncode or 1


def run(arguments: list[str]) -> int:
    """Start the whole stack and stay in the foreground; its router is the compiled one if that is up to date."""
    install("base")
    if is_compiled():
        os.environ["WARMPATH_COMPILED"] = str(COMPILED)
    # exec: Ctrl-C and SIGTERM reach the supervisor directly, and no parent process remains.
    os.execv(PYTHON, [str(PYTHON), "manage.py", "demo", *arguments])


def test(arguments: list[str]) -> int:
    """Run all tests in several processes; arguments go to pytest (``-n 0`` runs in one process)."""
    install("dev")
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise every program that a test starts compiles all modules
    environment.update(with_programs(TEST_PROGRAMS))
    with contextlib.suppress(FileNotFoundError):
        environment.update(browser())
    pytest = [PYTHON, "-m", "pytest", *XDIST_OPTIONS, "--durations=12", *arguments]
    if arguments:
        return subprocess.call(pytest, env=environment)
    with compiling() as can_compile:
        if can_compile:
            environment["TEST_ONLY_COMPILED"] = "1"  # tests of compiled modules need not run on the plain router, too
        collect = [PYTHON, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
        subprocess.call(collect, env=environment, stdout=subprocess.DEVNULL)  # the bytecode of all tests, once
        return subprocess.call(pytest, env=environment)


@contextlib.contextmanager
def compiling() -> Iterator[bool]:
    """Compile the router during the block; yields whether this machine can.

    Tests of the compiled router wait for it. Those that start first mostly wait for other programs.
    """
    try:
        check_requirements()
    except CannotCompileError:  # tests/compiled reports it
        yield False
        return
    with subprocess.Popen([sys.executable, "deploy/bootstrap.py", "compile"]):
        yield True


def check(_arguments: list[str]) -> int:
    """Run all static checks, even if one fails."""
    install("dev")
    return subprocess.call([PYTHON, "deploy/checks.py"])


def bench(arguments: list[str]) -> int:
    """Run the benchmarks and print their tables."""
    install("dev")
    return subprocess.call([PYTHON, "-m", "tests.benchmarks", *arguments], env=with_programs(BENCH_PROGRAMS))


def compile_(_arguments: list[str]) -> int:
    """Compile the router into a wheel in ``dist`` and into ``.compiled``."""
    compile_router()
    return 0


def wheel(_arguments: list[str]) -> int:
    """Only build the compiled wheel of the running Python."""
    compiled_wheel()
    return 0


def build(arguments: list[str]) -> int:
    """Build the sdist and all wheels; arguments are versions of Python, each of which must then be installed."""
    missing = build_wheels(arguments or VERSIONS)
    for version in missing:
        print(f"No compiled wheel for CPython {version}: it is not installed here. It installs the plain wheel.")
    return MISSING_PYTHON if arguments and missing else 0


def images(arguments: list[str]) -> int:
    """Build the container images."""
    from images.build import build_images  # noqa: PLC0415 - needs Python 3.11, which main checks first

    return build_images(arguments)


def audit(arguments: list[str]) -> int:
    """Look up the known vulnerabilities of all locked packages but compared routers; arguments go to pip-audit."""
    install("dev")
    return audit_locks(VENV / "bin" / "pip-audit", sorted({*LOCKS.glob("*.txt")} - {LOCKS / "peers.txt"}), arguments)


def clients(arguments: list[str]) -> int:
    """Run the tests of other people's clients; arguments go to pytest."""
    install("clients", CLIENTS)
    pytest = [CLIENTS / "bin" / "python", "-m", "pytest", "-c", "tests/clients/pytest.ini"]
    return subprocess.call([*pytest, *(arguments or ["tests/clients"])])


def sync(arguments: list[str]) -> int:
    """Only install the packages."""
    install(arguments[0] if arguments else "dev")
    return 0


def lock(_arguments: list[str]) -> int:
    """Write the lock files from pyproject.toml. They contain versions and hashes, and no URL."""
    install_uv()
    all_extras = ["--extra", "controlplane", "--extra", "cli", "--extra", "embedded", "--extra", "events"]
    compile_lock("base", *all_extras)
    compile_lock("router", "-c", "requirements/base.txt")
    compile_lock("picker", "--extra", "picker", "-c", "requirements/base.txt")
    installed = ["--extra", "controlplane", "--extra", "cli", "--extra", "otel"]
    compile_lock("controlplane", *installed, "-c", "requirements/base.txt", "-c", "requirements/picker.txt")
    compile_lock("semantic", "--extra", "semantic", "-c", "requirements/base.txt")
    extras = [*all_extras, "--extra", "otel", "--extra", "picker"]
    compile_lock("dev", *extras, "--group", "dev", "-c", "requirements/base.txt", "-c", "requirements/picker.txt")
    for group, constraints in (("compile", "base"), ("clients", "router"), ("peers", "router")):
        compile_lock(group, "--group", group, "-c", f"requirements/{constraints}.txt")
    return 0


def compile_lock(name: str, *options: str) -> None:
    subprocess.check_call(
        [UV, "pip", "compile", "pyproject.toml", *options, *LOCK_OPTIONS, "-o", f"requirements/{name}.txt"]
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
