"""Licences, vulnerabilities and the Dockerfile: what is known about the parts of a release."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.contracts.documents.reading import ROOT

PINNED = "uvloop"  # the package with a vulnerability
IMAGES = ROOT / "deploy/images"
PIP_AUDIT = Path(sys.executable).with_name("pip-audit")


def in_deploy(code: str) -> str:
    """Run code that imports the modules of ``deploy``, with its own name space."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'deploy'); {code}"]
    return subprocess.check_output(command, cwd=ROOT, text=True)


# --- licences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("MIT AND BSD-3-Clause", True),
        ("AGPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-or-later WITH GCC-exception-3.1", True),
    ],
)
def test_a_component_may_have_reviewed_licences_only(expression, allowed):
    code = f"from images.components import *; check_licences([Component('part', '1', '', {expression!r}, '')])"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'deploy'); {code}"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (process.returncode == 0) == allowed
    assert allowed or f"part 1: {expression}" in process.stderr


def test_every_debian_package_is_locked_and_has_a_licence():
    code = "import json; from images.debian import *; base = read_base()"
    code += "; print(json.dumps([{n: p['licence'] for n, p in base.packages.items()}, [p.name for p in read_lock()]]))"
    licences, locked = json.loads(in_deploy(code))
    assert sorted(licences) == locked
    assert all(licences.values())


# --- Dockerfile --------------------------------------------------------------------------------------------------


def stages() -> dict[str, list[str]]:
    """Instructions of each stage of the Dockerfile, with continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (IMAGES / "Dockerfile").read_text())
    parts = re.split(r"(?m)^FROM \S+ AS (\S+)\n", text)[1:]
    return {name: body.strip().splitlines() for name, body in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("name", ["router", "controlplane"])
def test_the_dockerfile_has_the_settings_and_the_files_of_the_script(name):
    code = f"from images.contents import *; print('\\n'.join(dockerfile_settings(IMAGES[{name!r}])))"
    copies = [f"COPY --from={name}-files /image /"]
    copies.append(f"COPY --from={name}-files --chown=10001:10001 /image/var/lib/warmpath /var/lib/warmpath")
    assert stages()[name] == [*copies, *in_deploy(code).splitlines()]
    assert stages()[f"{name}-files"][-1] == f"RUN python3 deploy/bootstrap.py images $DEBIAN --root /image {name}"


def test_the_dockerfile_copies_what_the_script_reads():
    code = "from wheels import SDIST_SOURCES; print('\\n'.join(SDIST_SOURCES))"
    ignored = (IMAGES / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "**"
    assert {f"!{name}" for name in in_deploy(code).split()} == {line for line in ignored if line.startswith("!")}


def test_the_dockerfile_builds_on_the_release_that_is_locked():
    release = in_deploy("from images.debian import *; print(read_base().release)").strip()
    assert f"FROM debian:{release}-slim AS build" in (IMAGES / "Dockerfile").read_text()


# --- vulnerabilities ---------------------------------------------------------------------------------------------


class Advisories(BaseHTTPRequestHandler):
    """An advisory service that knows one vulnerability."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = query["package"]["name"] == PINNED
        affected = [{"package": {"name": PINNED, "ecosystem": "PyPI"}, "ranges": [], "versions": [query["version"]]}]
        advisory = {"id": "TEST-2026-1", "summary": "A test", "details": "A test", "affected": affected}
        body = json.dumps({"vulns": [advisory]} if found else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def advisories() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Advisories) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()
        thread.join(10)


def audit(url: str, program: Path = PIP_AUDIT) -> subprocess.CompletedProcess[str]:
    """Audit the router's lock; ``make audit`` does so for all locks."""
    options = ["--vulnerability-service=osv", f"--osv-url={url}", "--timeout=5"]
    code = "from audit import *; from pathlib import Path"
    code += f"; sys.exit(audit_locks(Path({str(program)!r}), [Path('requirements/router.txt')], {options}))"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'deploy'); {code}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_known_vulnerability_is_reported(advisories):
    process = audit(advisories)
    assert process.returncode == 1, process.stderr
    assert f"{PINNED} " in process.stdout
    assert "TEST-2026-1" in process.stdout


def test_an_audit_that_nobody_answered_does_not_pass():
    process = audit("http://127.0.0.1:9/v1/query")
    assert process.returncode == 4, process.stdout + process.stderr
    assert "vulnerabilities are unknown" in process.stderr


def test_an_audit_that_skips_packages_does_not_pass(tmp_path):
    """What pip-audit 2.10 does with an index that has packages and no advisories."""
    program = tmp_path / "pip-audit"
    message = "ERROR:pip_audit._cli:uv: Dependency not found on PyPI and could not be audited: uv (0.13.8)"
    program.write_text(f'#!/bin/sh\ncase "$*" in *--strict*) echo "{message}" >&2; exit 1;; esac\n')
    program.chmod(0o755)
    assert audit("http://127.0.0.1:9/", program).returncode == 4


def test_make_audit_reads_every_lock():
    dry = subprocess.run(["make", "-n", "audit"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "deploy/bootstrap.py audit" in dry.stdout
    code = "import bootstrap, pathlib; bootstrap.install = lambda name: None"
    code += "; bootstrap.audit_locks = lambda program, locks, arguments: print(*[path.name for path in locks]) or 0"
    code += "; bootstrap.main(['audit'])"
    audited = [*in_deploy(code).split(), "peers.txt"]  # which is only compared with, and never shipped
    assert sorted(audited) == sorted(path.name for path in (ROOT / "requirements").glob("*.txt"))
