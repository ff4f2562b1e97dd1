"""Runs the units of ``deploy/systemd`` as systemd does, as far as they use it: without cgroups and hardening."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import time
from collections import defaultdict
from pathlib import Path

from controlplane.stack.paths import Child
from tests.end_to_end.live_stack import ROOT
from tests.reliability.stand import ManagedProcess

UNITS = ROOT / "deploy/systemd"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"


def options_of(text: str) -> dict[str, list[str]]:
    """Values of each option of a unit file, in order. Names are unique over sections here."""
    options: dict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            options[name].append(value)
    return options


class Host:
    """A host's file system below a folder, with the release that ``/opt/warmpath/current`` links to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("etc", "opt/warmpath", "var/lib", "run/credentials"):
            (folder / name).mkdir(parents=True)

    def use_release(self, version: str) -> None:
        """Install this checkout as a release, and make it the current one."""
        current = self.install(version).with_name("current")
        current.unlink(missing_ok=True)
        current.symlink_to(version)

    def install(self, version: str) -> Path:
        """A release's folder, with links to this checkout."""
        release = self.folder / "opt/warmpath" / version
        if not release.exists():
            release.mkdir()
            for path in ROOT.iterdir():
                (release / path.name).symlink_to(path)
        return release

    def located(self, text: str) -> str:
        """Text with the paths of this host."""
        return re.sub(r"(?<![\w/])/(etc|opt)/warmpath\b", rf"{self.folder}/\1/warmpath", text)

    def sh(self, script: str, **environment: str) -> str:
        """Output of a documented command, run by root's shell."""
        path = f"{ROOT}/.venv/bin:{PATH}"  # of the interpreter that a document calls python3
        done = subprocess.run(
            ["sh", "-ec", self.located(script)],
            env={"PATH": path, "WARMPATH_ETC": str(self.folder / "etc/warmpath"), "WARMPATH_UNITS": "", **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Service:
    """One unit, or one instance of a template."""

    def __init__(self, host: Host, unit: str, instance: str = "", *options: str) -> None:
        self.name = f"{unit}{instance}"
        self._host, self._instance = host, instance
        self._text = (UNITS / f"{unit}.service").read_text()
        self._arguments = options  # more arguments of the command
        self._notified: socket.socket | None = None
        self._process: ManagedProcess | None = None
        self._variables: dict[str, str] = {}

    @property
    def process(self) -> ManagedProcess:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """``systemctl start``: read the unit and its files, start the process, and wait for it if it notifies."""
        options = options_of(self._expanded(self._text))
        environment = self._environment(options)
        variable = re.compile(r"\$\{(\w+)\}")
        (line,) = options["ExecStart"]
        command = [variable.sub(lambda match: environment[match[1]], word) for word in shlex.split(line)]
        (kind,), (folder,) = options["Type"], options["WorkingDirectory"]
        if kind == "notify":
            environment["NOTIFY_SOCKET"] = self._listen()
        child = Child(self.name, [*command, *self._arguments], self._is_ready if kind == "notify" else lambda: True)
        self._variables = environment
        lines = self._process.lines if self._process else []
        self._process = ManagedProcess(child, environment, Path(folder))
        self._process.lines = lines
        self._process.start()

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """A command in the environment of the running service, as a probe of its container would run."""
        path = f"{ROOT}/.venv/bin:{PATH}"
        folder = self._host.folder / "opt/warmpath/current"
        variables = {**self._variables, "PATH": path}
        return subprocess.run(
            command, env=variables, cwd=folder, capture_output=True, text=True, timeout=60, check=False
        )

    def close(self) -> None:
        """Kill what runs, after a failed test too."""
        if self._process and self._process.is_running:
            self.process.kill()
        if self._notified:
            self._notified.close()

    def stop(self) -> None:
        """``systemctl stop``: SIGTERM, and no need for SIGKILL."""
        (limit_s,) = options_of(self._text)["TimeoutStopSec"]
        started = time.monotonic()
        self.process.stop()
        assert self.process.wait() == 0, "\n".join(self.process.lines[-40:])
        assert time.monotonic() - started < int(limit_s), f"{self.name} would have been killed"

    def restart(self) -> None:
        """``systemctl restart``."""
        self.stop()
        self.start()

    def crash(self) -> None:
        """``kill -9``, after which systemd starts the process again."""
        options = options_of(self._text)
        assert options["Restart"] == ["always"]
        self.process.kill()
        time.sleep(float(*options["RestartSec"]))
        self.start()

    def _expanded(self, text: str) -> str:
        specifiers = {"%i": self._instance, "%d": str(self._credentials), "%S": str(self._host.folder / "var/lib")}
        for specifier, value in specifiers.items():
            text = text.replace(specifier, value)
        return self._host.located(text)

    @property
    def _credentials(self) -> Path:
        return self._host.folder / "run/credentials" / self.name

    def _environment(self, options: dict[str, list[str]]) -> dict[str, str]:
        """What systemd sets, and nothing of this process."""
        self._credentials.mkdir(exist_ok=True)
        for name, _, path in (value.partition(":") for value in options["LoadCredential"]):
            shutil.copy(path, self._credentials / name)
        environment = {"PATH": PATH}
        environment |= dict(word.split("=", 1) for value in options["Environment"] for word in shlex.split(value))
        for path in options["EnvironmentFile"]:
            environment |= environment_file(Path(path).read_text())
        for folder in options["StateDirectory"]:
            (self._host.folder / "var/lib" / folder).mkdir(parents=True, exist_ok=True)
        return environment

    def _listen(self) -> str:
        """Path of a new notification socket."""
        path = self._host.folder / f"run/{self.name}"
        path.unlink(missing_ok=True)
        if self._notified:
            self._notified.close()
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.setblocking(False)
        self._notified.bind(str(path))
        return str(path)

    def _is_ready(self) -> bool:
        """Whether the next notification says so."""
        assert self._notified is not None
        try:
            return "READY=1" in self._notified.recv(4096).decode().splitlines()
        except BlockingIOError:
            return False


def environment_file(text: str) -> dict[str, str]:
    """Variables of an environment file."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)
