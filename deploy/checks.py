"""Every static check of the project, side by side; what fails is printed whole."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BIN = Path(sys.executable).parent
MANAGE = [sys.executable, "manage.py"]
# Values that satisfy production's rules, for a check that reads settings and connects to nothing.
PRODUCTION = {
    "DJANGO_SETTINGS_MODULE": "controlplane.settings.production",
    "WARMPATH_SECRET_KEY": "checked-at-build-time-0123456789-abcdefghijklmnopqrstuvwxyz",
    "WARMPATH_ROUTER_ADMIN_TOKEN": "checked-at-build-time-0123456789",
    "WARMPATH_ALLOWED_HOSTS": "warmpath.example",
    "WARMPATH_DATABASE_URL": "postgresql://warmpath@127.0.0.1:1/warmpath",
    "WARMPATH_DATABASE_POOL": "0",
    "WARMPATH_REDIS_URL": "redis://127.0.0.1:1/0",
}
TESTING = {"DJANGO_SETTINGS_MODULE": "controlplane.settings.test"}

CHECKS: dict[str, tuple[list[str | Path], dict[str, str]]] = {
    "types": ([BIN / "mypy"], {}),
    "format": ([BIN / "ruff", "format", "--check", "."], {}),
    "lint": ([BIN / "ruff", "check", "."], {}),
    "imports": ([BIN / "lint-imports", "--no-cache"], {}),
    "deployment": ([*MANAGE, "check", "--deploy", "--fail-level", "WARNING"], PRODUCTION),
    "migrations": ([sys.executable, "-W", "ignore", *MANAGE[1:], "makemigrations", "--check", "--dry-run"], TESTING),
    "interface": ([*MANAGE, "api_contract", "--check"], TESTING),
    "documents": ([sys.executable, "-m", "pytest", "-q", "tests/contracts/documents"], {}),
}


def main() -> int:
    """Run all; 0 if all pass."""
    with ThreadPoolExecutor(max_workers=2) as threads:
        outcomes = list(threads.map(run, CHECKS))
    return 0 if all(outcomes) else 1


def run(name: str) -> bool:
    """Run one check and say how it went."""
    command, environment = CHECKS[name]
    begun = time.monotonic()
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    verdict = "ok" if done.returncode == 0 else "FAILED"
    print(f"  {name:<12}{verdict:<8}{time.monotonic() - begun:5.1f} s", flush=True)
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
