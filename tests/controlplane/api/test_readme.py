"""The session in the API's README works."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from controlplane.services.access.tokens import create_token

README = Path(__file__).resolve().parents[3] / "controlplane/api/README.md"


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed: the README's session is not executed")
def test_the_session_does_what_the_readme_says(live_server, pool, operator):
    _, text = create_token(operator, name="readme", scopes=["write"])
    (session,) = re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "TOKEN": text, "WARMPATH": live_server.url, "no_proxy": "*"}

    command = ["bash", "-euc", session]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert result.returncode == 0, result.stderr + result.stdout
    assert pool.policies.get(group=None).live().strategy == "prefix_hash"
