"""Debian's Alertmanager on loopback, with its state in a folder of the test."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG = """
route: {receiver: hook, group_by: [alertname, pool], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}
receivers:
- name: hook
  webhook_configs: [{url: "%s", send_resolved: true}]
"""


TEMPLATES = b"/usr/share/prometheus/alertmanager"


class Alertmanager:
    """A running Alertmanager."""

    def __init__(self, url: str) -> None:
        self.url = url

    def alerts(self) -> list[dict[str, Any]]:
        """Active alerts."""
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=5) as answer:
            found: list[dict[str, Any]] = json.load(answer)
        return found


@contextmanager
def alertmanager(program: str, folder: Path, hook: str) -> Iterator[Alertmanager]:
    """Run Alertmanager; ``hook`` is the URL of a webhook receiver."""
    (folder / "config.yml").write_text(CONFIG % hook)
    command = [_movable(program, folder), f"--config.file={folder}/config.yml", f"--storage.path={folder}/data"]
    command += ["--cluster.listen-address=", "--web.listen-address=127.0.0.1:0", "--log.level=debug"]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        port = until(lambda: _port(folder / "log", process), "it says where it listens")
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(f"{url}/-/ready"), "it is ready")
        yield Alertmanager(url)
    finally:
        process.terminate()
        process.wait(timeout=10)
        log.close()


def _movable(program: str, folder: Path) -> str:
    """The installed program. Debian's build has a fixed path for its templates; an unpacked copy gets a relative
    path of the same length.
    """
    place = Path(TEMPLATES.decode())
    if place.exists():
        return program
    for template in (Path(program).parents[2] / str(place)[1:]).glob("*.tmpl"):
        shutil.copy(template, folder)
    copy = folder / "alertmanager"
    copy.write_bytes(Path(program).read_bytes().replace(TEMPLATES, b".".ljust(len(TEMPLATES), b"/")))
    copy.chmod(0o755)
    return str(copy)


def until(what: Callable[[], Any], words: str, seconds: float = 20) -> Any:
    """Poll until a value is truthy; AssertionError on timeout."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {words}")


def _port(log: Path, process: subprocess.Popen[bytes]) -> str | None:
    assert process.poll() is None, log.read_text()[-2000:]
    found = re.search(r"address=127\.0\.0\.1:(\d+)", log.read_text())
    return found[1] if found and found[1] != "0" else None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False
