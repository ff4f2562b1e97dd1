"""The lines that the page Get started offers to copy, run as they are with the official clients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.servers import KEY, MODEL, Servers

LINES = Path(__file__).resolve().parents[2] / "templates/telemetry/clients"


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_the_lines_print_the_text_of_a_response(servers: Servers, client: str) -> None:
    lines = (LINES / f"{client}.txt").read_text().replace("{{ address }}", servers.router).replace("{{ model }}", MODEL)
    environment = {**os.environ, "WARMPATH_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-c", lines], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10
