"""The session in the command line's README works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[3] / "controlplane/cli/README.md"


@pytest.mark.timeout(400)  # fifteen processes, one after the other
@pytest.mark.django_db(transaction=True)
def test_the_session_does_what_the_readme_says(live_server, token, replica, policy, tmp_path):
    (session,) = re.findall(r"^```sh\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    root = README.parents[2]
    command = f'warmpath() {{ PYTHONPATH={root} {sys.executable} -m controlplane.cli "$@"; }}\n{session}'
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WARMPATH_")}
    environment |= {"TOKEN": token, "WARMPATH": live_server.url, "XDG_CONFIG_HOME": str(tmp_path), "no_proxy": "*"}

    result = subprocess.run(
        ["bash", "-euc", command],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert result.returncode == 0, result.stderr + result.stdout
    assert token not in result.stdout + result.stderr
    assert [revision.strategy for revision in policy.revisions.order_by("number")] == [
        "round_robin",
        "prefix_hash",
        "round_robin",
    ]
