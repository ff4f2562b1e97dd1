"""Runs all static checks of the project in parallel and prints the full output of those that fail."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BIN = Path(sys.executable).parent
MANAGE = [sys.executable, "manage.py"]
# Values that satisfy the rules of production settings. The check only reads settings; it connects to nothing.
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
    "size": ([sys.executable, "-m", "tests.benchmarks", "size"], {}),
    "documents": ([sys.executable, "-m", "pytest", "-q", "tests/contracts/documents"], {}),
}


def main() -> int:
    """Run all checks; 0 if all pass."""
    with ThreadPoolExecutor(max_workers=2) as threads:
        outcomes = list(threads.map(run, CHECKS))
    return 0 if all(outcomes) else 1


def run(name: str) -> bool:
    """Run one check and print its result."""
    command, environment = CHECKS[name]
    started_at = time.monotonic()
    process = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    result = "ok" if process.returncode == 0 else "FAILED"
    print(f"  {name:<12}{result:<8}{time.monotonic() - started_at:5.1f} s", flush=True)
    if process.returncode:
        print(process.stdout + process.stderr, flush=True)
    return process.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
