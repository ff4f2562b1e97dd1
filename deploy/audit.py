"""Asks an advisory service for the known vulnerabilities of the locked packages, with pip-audit.

Only the standard library; pip-audit comes from ``requirements/dev.txt``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VULNERABLE = 1
NOT_ASKED = 4  # exit status if the advisory service could not be asked about every package
# What pip-audit reports when its service does not respond, or does not know a package: an index without advisories.
UNKNOWN = (
    "ConnectionError",
    "Connection error",
    "Could not connect",
    "Max retries exceeded",
    "ProxyError",
    "timed out",
)
UNKNOWN += ("could not be audited",)


def audit_locks(pip_audit: Path, locks: Sequence[Path], arguments: Sequence[str]) -> int:
    """Audit the lock files; 0 if no vulnerability is known, VULNERABLE, NOT_ASKED, or pip-audit's status."""
    statuses = []
    for lock in locks:
        print(lock.name, flush=True)
        statuses.append(_audit(pip_audit, lock, arguments))
        if statuses[-1] == NOT_ASKED:
            break
    return max(statuses, default=0)


def _audit(pip_audit: Path, lock: Path, arguments: Sequence[str]) -> int:
    command = [str(pip_audit), "--strict", "--progress-spinner=off", "--disable-pip", "--require-hashes", *arguments]
    process = subprocess.run([*command, "-r", str(lock)], stderr=subprocess.PIPE, text=True, check=False)
    print(process.stderr, end="", file=sys.stderr)
    if process.returncode and any(words in process.stderr for words in UNKNOWN):
        print("No advisory service has responded for every package, so vulnerabilities are unknown.", file=sys.stderr)
        return NOT_ASKED
    return process.returncode
