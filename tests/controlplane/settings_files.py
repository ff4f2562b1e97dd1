"""Reads a settings module in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.contracts.documents.reading import ROOT

PRODUCTION = {
    "WARMPATH_SECRET_KEY": "read-by-a-test-alone-0123456789-abcdefghijklmnopqrstuvwxyz",
    "WARMPATH_ROUTER_ADMIN_TOKEN": "read-by-a-test-alone-0123456789-abc",
    "WARMPATH_ALLOWED_HOSTS": "warmpath.example",
    "WARMPATH_DATABASE_URL": "postgresql://app@127.0.0.1:1/warmpath",
    "WARMPATH_REDIS_URL": "redis://127.0.0.1:1/0",
}


def read(module, names, **environment):
    """(values of the named settings, or None if the module raises; standard error)."""
    code = (
        f"import json, controlplane.settings.{module} as s;"
        f"print(json.dumps({{n: getattr(s, n, None) for n in {names!r}}}, default=str))"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WARMPATH_")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return json.loads(result.stdout or "null"), result.stderr
