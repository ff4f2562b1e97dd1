"""`make compile`, on machines that have what it takes and on others."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_c_compiler_it_says_in_a_sentence_what_to_install(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE", "deploy", "requirements"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / "nothing").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    done = subprocess.run(
        [sys.executable, "deploy/bootstrap.py", "compile"],
        cwd=tmp_path,
        env=environment | {"PATH": str(tmp_path / "nothing")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "takes a C compiler" in done.stderr
    assert "apt-get install gcc libc6-dev" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_no_native_module_lies_where_the_plain_router_would_run_it():
    assert list((ROOT / "routing").rglob("*.so")) == []
