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


TEMPLATE_FOLDER = b"/usr/share/prometheus/alertmanager"


class Alertmanager:
    """A running Alertmanager."""

    def __init__(self, url: str) -> None:
        self.url = url

    def alerts(self) -> list[dict[str, Any]]:
        """Active alerts."""
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=5) as response:
            alerts: list[dict[str, Any]] = json.load(response)
        return alerts


@contextmanager
def alertmanager(program: str, folder: Path, webhook_url: str) -> Iterator[Alertmanager]:
    """Run Alertmanager, which notifies a webhook."""
    (folder / "config.yml").write_text(CONFIG % webhook_url)
    command = [
        _with_local_templates(program, folder),
        f"--config.file={folder}/config.yml",
        f"--storage.path={folder}/data",
    ]
    command += ["--cluster.listen-address=", "--web.listen-address=127.0.0.1:0", "--log.level=debug"]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        port = until(lambda: _port(folder / "log", process), "Alertmanager to log its port")
        url = f"http://127.0.0.1:{port}"
        until(lambda: _responds(f"{url}/-/ready"), "Alertmanager to be ready")
        yield Alertmanager(url)
    finally:
        process.terminate()
        process.wait(timeout=10)
        log.close()


def _with_local_templates(program: str, folder: Path) -> str:
    """The installed program. Debian's build has a fixed path for its templates; an unpacked copy gets a relative
    path of the same length.
    """
    templates = Path(TEMPLATE_FOLDER.decode())
    if templates.exists():
        return program
    for template in (Path(program).parents[2] / str(templates)[1:]).glob("*.tmpl"):
        shutil.copy(template, folder)
    copy = folder / "alertmanager"
    copy.write_bytes(Path(program).read_bytes().replace(TEMPLATE_FOLDER, b".".ljust(len(TEMPLATE_FOLDER), b"/")))
    copy.chmod(0o755)
    return str(copy)


def until(poll: Callable[[], Any], description: str, timeout_s: float = 20) -> Any:
    """Call ``poll`` until its value is truthy; that value. AssertionError on timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := poll():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {timeout_s} s for {description}")


def _port(log: Path, process: subprocess.Popen[bytes]) -> str | None:
    assert process.poll() is None, log.read_text()[-2000:]
    match = re.search(r"address=127\.0\.0\.1:(\d+)", log.read_text())
    return match[1] if match and match[1] != "0" else None


def _responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False
