"""The Dockerfile's steps, executed without a container engine: ``TEST_DOCKERFILE=1``, because it takes five minutes.

Each stage is a root file system: a copy of its base, Debian as ``mmdebstrap`` makes it, in which ``RUN`` commands run.
Needs root and ``mmdebstrap``. Machines that reach Debian and PyPI by settings of their own pass these on.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.contracts.documents.reading import ROOT
from tests.end_to_end.containers import Container

FILE = ROOT / "deploy" / "images" / "Dockerfile"
MACHINE_FILES = ("etc/pip.conf", "etc/xdg/pip", "root/.config/pip", "usr/local/share/ca-certificates")
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = {"router": ("-m", "routing", "--help"), "controlplane": ("manage.py", "--version")}

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif("TEST_DOCKERFILE" not in os.environ, reason="TEST_DOCKERFILE=1 executes it, in five minutes"),
]


@dataclass
class Stage:
    """One stage: its root file system and what its instructions have set."""

    root: Path
    folder: str = "/"
    arguments: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def run(self, command: str) -> None:
        """Run a shell command in the root file system, with the network and pip's local folders of this machine."""
        prepare = [f"mount --rbind /{name} {self.root}/{name}" for name in ("dev", "proc", "sys")]
        prepare += [f"mkdir -p {self.root}{path} && mount --bind {path} {self.root}{path}" for path in local_folders()]
        inside = shlex.quote(f"cd {self.folder} && {command}")
        script = " && ".join([*prepare, f"exec chroot {self.root} /bin/sh -c {inside}"])
        environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment |= {"PATH": SEARCH_PATH, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **self.arguments}
        subprocess.run(["unshare", "--mount", "/bin/sh", "-c", script], env=environment, check=True)


class Result(Container):
    """A finished stage, to be run as a container engine would."""

    def __init__(self, stage: Stage) -> None:
        self.root = stage.root
        self.settings = {"WorkingDir": stage.settings["WORKDIR"], "User": stage.settings["USER"]}
        self.environment = dict(item.split("=", 1) for item in shlex.split(stage.settings["ENV"]))


def local_folders() -> list[str]:
    """Folders of this machine that pip's settings name; an index links to files beside it."""
    command = ["python3", "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    indexes = {str(Path(path).parent) for path in re.findall(r"file://(/[^'\s]+)", listed)}
    paths = indexes | set(re.findall(r"(?<=[='\s])(/[^'\s]+)", listed))
    return sorted(path for path in paths if Path(path).is_dir())


def instructions() -> Iterator[tuple[str, str, list[str]]]:
    """Base, name and instructions of each stage, with continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", FILE.read_text()).replace("\\\n", " ")
    parts = re.split(r"(?m)^FROM (\S+) AS (\S+)\n", text)[1:]
    for base, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        yield base, name, [line for line in body.splitlines() if line.strip()]


def make_base(folder: Path) -> Path:
    """Debian's minimal system, of the release that the Dockerfile names."""
    release = next(base for base, _, _ in instructions()).removeprefix("debian:").removesuffix("-slim")
    listed = Path("/etc/apt/sources.list.d")
    sources = [str(path) for path in (Path("/etc/apt/sources.list"), *listed.glob("*.sources")) if path.is_file()]
    options = [f"--aptopt={path}" for path in Path("/etc/apt/apt.conf.d").glob("99*") if "Acquire" in path.read_text()]
    base = folder / "debian"
    subprocess.run(["mmdebstrap", "--variant=minbase", *options, release, base, *sources], check=True)
    for name in MACHINE_FILES:
        source = Path("/") / name
        if source.is_dir():
            shutil.copytree(source, base / name, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copy2(source, base / name)
    return base


def copy(stage: Stage, arguments: str, stages: dict[str, Stage]) -> None:
    """One COPY: from another stage, else what ``Dockerfile.dockerignore`` leaves of the checkout."""
    flags = dict(re.findall(r"--(\w+)=(\S+)", arguments))
    source, target = [word for word in arguments.split() if not word.startswith("--")]
    path = stage.root / str(Path(stage.folder) / target).lstrip("/")
    if "from" in flags:
        subprocess.run(["cp", "-aT", f"{stages[flags['from']].root}{source}", path], check=True)
    else:
        ignored = FILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
        names = [line[1:] for line in ignored if line.startswith("!")]
        tracked = subprocess.run(["git", "ls-files", "-z", *names], cwd=ROOT, capture_output=True, check=True).stdout
        for name in tracked.decode().split("\0")[:-1]:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, path / name)
    if "chown" in flags:
        subprocess.run(["chown", "-R", flags["chown"], path], check=True)


def build(folder: Path) -> dict[str, Stage]:
    """All stages."""
    debian, stages = make_base(folder), dict[str, Stage]()
    for base, name, lines in instructions():
        before = stages.get(base)
        stage = stages[name] = Stage(folder / name, before.folder if before else "/")
        if base == "scratch":
            stage.root.mkdir()
        else:
            subprocess.run(["cp", "-a", "--reflink=auto", before.root if before else debian, stage.root], check=True)
        for line in lines:
            instruction, _, rest = line.partition(" ")
            rest = rest.strip()
            stage.settings[instruction] = rest
            if instruction == "RUN":
                stage.run(rest)
            elif instruction == "COPY":
                copy(stage, rest, stages)
            elif instruction == "WORKDIR":
                stage.folder = rest
                (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif instruction == "ARG":
                variable, _, value = rest.partition("=")
                stage.arguments[variable] = value
    return stages


def test_the_steps_of_the_dockerfile_give_images_that_run(tmp_path: Path) -> None:
    assert os.geteuid() == 0, "needs root"
    assert shutil.which("mmdebstrap"), "needs mmdebstrap"
    stages = build(tmp_path)

    for name, arguments in PROGRAMS.items():
        process = Result(stages[name]).run("/opt/venv/bin/python", *arguments)
        assert process.returncode == 0, process.stderr
        assert not (stages[name].root / "bin" / "sh").exists()
        assert json.loads(stages[name].settings["CMD"])
    imported = "import routing.balancing.residency as module; print(module.__file__)"
    assert Result(stages["router"]).run("/opt/venv/bin/python", "-c", imported).stdout.strip().endswith(".so")
