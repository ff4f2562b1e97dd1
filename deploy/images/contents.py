"""What each image runs, and with which settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

USER = 10001  # and its group
SPECIAL = {"tmp": (0, 0o1777), "var/lib/warmpath": (USER, 0o750)}  # owner and mode; all else is root's, and read-only
PACKAGES = "opt/venv"
CODE = "opt/warmpath"
DOCUMENTS = "usr/share/doc/warmpath"
# Files of wheels that no image contains: tests, translations (Warmpath is in English), and types for type checkers.
WITHOUT = ("*/tests/*", "*/LC_MESSAGES/*", "*.pyi")
STATE = "/var/lib/warmpath"

ENVIRONMENT = {
    "PATH": f"/{PACKAGES}/bin:/usr/bin",
    "PYTHONPATH": f"/{CODE}",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
    "HOME": STATE,
    "WARMPATH_DATA_DIR": STATE,
    "WARMPATH_BIND": "0.0.0.0",  # noqa: S104 - a container's network is its own
}


@dataclass(frozen=True)
class Image:
    """One image."""

    short_name: str
    lock: str  # name of its file in requirements
    title: str
    description: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]  # a container's arguments replace it
    ports: tuple[int, ...]
    environment: dict[str, str]
    has_pages: bool = False  # templates, static files and manage.py
    leave_out: tuple[str, ...] = ()  # paths of the wheel's files

    @property
    def name(self) -> str:
        return f"warmpath-{self.short_name}"

    def config(self, version: str) -> dict[str, Any]:
        """The part of the image's configuration that engines run it with."""
        return {
            "User": f"{USER}:{USER}",
            "WorkingDir": f"/{CODE}",
            "Env": [f"{name}={value}" for name, value in (ENVIRONMENT | self.environment).items()],
            **({"Entrypoint": list(self.entrypoint)} if self.entrypoint else {}),
            "Cmd": list(self.command),
            "ExposedPorts": {f"{port}/tcp": {} for port in self.ports},
            "Volumes": {STATE: {}},
            "StopSignal": "SIGTERM",
            "Labels": self.labels(version),
        }

    def labels(self, version: str) -> dict[str, str]:
        values = {"title": self.title, "description": self.description, "version": version, "licenses": "Apache-2.0"}
        return {f"org.opencontainers.image.{name}": value for name, value in values.items()}


ROUTER = Image(
    short_name="router",
    lock="semantic",
    title="Warmpath router",
    description="Routes requests to vLLM replicas whose KV caches are warm for them",
    entrypoint=(f"/{PACKAGES}/bin/python", "-m", "routing"),
    command=("serve", "--config", "/etc/warmpath/router.json"),
    ports=(8080, 8081),
    environment={},
    leave_out=(f"{CODE}/controlplane", f"{CODE}/telemetry", f"{PACKAGES}/bin/warmpath"),
)
CONTROL_PLANE = Image(
    short_name="controlplane",
    lock="controlplane",
    title="Warmpath control plane",
    description="Web UI, REST API, worker and beat of Warmpath",
    entrypoint=(),
    command=("gunicorn", "controlplane.asgi:application", "--worker-class=asgi", "--workers=2", "--bind=0.0.0.0:8000"),
    ports=(8000,),
    environment={"DJANGO_SETTINGS_MODULE": "controlplane.settings.production"},
    has_pages=True,
)
IMAGES = {image.short_name: image for image in (ROUTER, CONTROL_PLANE)}


def dockerfile_settings(image: Image) -> list[str]:
    """The instructions of ``Dockerfile`` that set what ``Image.config`` does, except the version."""
    config = image.config("")
    environment = " \\\n    ".join(config["Env"])
    labels = " \\\n    ".join(f"{name}={json.dumps(value)}" for name, value in config["Labels"].items() if value)
    lines = [f"ENV {environment}", f"LABEL {labels}", f"EXPOSE {' '.join(config['ExposedPorts'])}"]
    lines += [f"VOLUME {json.dumps(list(config['Volumes']))}", f"WORKDIR {config['WorkingDir']}"]
    lines += [f"USER {config['User']}", f"STOPSIGNAL {config['StopSignal']}"]
    lines += [f"ENTRYPOINT {json.dumps(config['Entrypoint'])}"] if image.entrypoint else []
    return [*lines, f"CMD {json.dumps(config['Cmd'])}"]
