"""Runs programs of a container image without a container engine: in its root file system, read-only, as its user.

Needs root, or user namespaces. As a script it makes the mounts in a mount namespace of its own and becomes the program:

    unshare --mount python containers.py ROOT WORKING_DIR USER READ_ONLY_FOLDERS -- PROGRAM ARGUMENT ...
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from functools import cached_property
from pathlib import Path
from typing import Any

WRITABLE = {"/tmp": "mode=1777", "/var/lib/warmpath": "mode=0750"}


class OciImage:
    """An image layout in one archive, with its digests verified."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as layout:
            self._blobs = {
                Path(item.name).name: layout.extractfile(item).read() for item in layout if "blobs/" in item.name
            }
            self.index = json.load(layout.extractfile("index.json"))
            self.layout_version = json.load(layout.extractfile("oci-layout"))["imageLayoutVersion"]
        (self.descriptor,) = self.index["manifests"]
        self.manifest = json.loads(self.blob(self.descriptor))
        self.config: dict[str, Any] = json.loads(self.blob(self.manifest["config"]))

    def blob(self, descriptor: dict[str, Any]) -> bytes:
        content = self._blobs[descriptor["digest"].partition(":")[2]]
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == descriptor["digest"]
        assert len(content) == descriptor["size"]
        return content

    @cached_property
    def layers(self) -> list[bytes]:
        """The layers as archives."""
        layers = [gzip.decompress(self.blob(layer)) for layer in self.manifest["layers"]]
        digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        assert digests == self.config["rootfs"]["diff_ids"]
        return layers


class Container:
    """A root file system and how to run programs in it."""

    def __init__(self, image: OciImage, root: Path) -> None:
        import io

        for layer in image.layers:
            with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
                archive.extractall(root, numeric_owner=True, filter="fully_trusted")
        self.root = root
        self.settings = image.config["config"]
        self.environment = dict(variable.split("=", 1) for variable in self.settings["Env"])

    def command(self, *arguments: str | Path, read_only: Path | None = None) -> list[str]:
        """A command of this machine that runs a program of the image, with a folder at its own path."""
        unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
        settings = [self.root, self.settings["WorkingDir"], self.settings["User"].partition(":")[0], read_only or "-"]
        return [str(part) for part in (*unshare, sys.executable, __file__, *settings, "--", *arguments)]

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )


def can_contain() -> bool:
    """Whether this user may create a mount namespace."""
    options = [] if os.geteuid() == 0 else ["--map-root-user"]
    try:
        return (
            subprocess.run(["unshare", *options, "--mount", "true"], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


# --- as a script -------------------------------------------------------------------------------------------------


def become(root: str, working_dir: str, user: str, read_only: str, program: list[str]) -> None:
    """Mount what an engine would, and replace this process by the program."""
    mount("--bind", root, root)
    mount("-o", "remount,bind,ro", root)
    for folder in ("/proc", "/dev"):
        mount("--rbind", folder, root + folder)
    is_root = Path("/proc/self/uid_map").read_text().split()[2] != "1"  # else only one user is mapped
    for folder, options in WRITABLE.items():
        owner = f",uid={user},gid={user}" if is_root and folder != "/tmp" else ""
        mount("-t", "tmpfs", "-o", options + owner, "tmpfs", root + folder)
    if read_only != "-":
        Path(root + read_only).mkdir(parents=True, mode=0o755)
        mount("--bind", "-o", "ro", read_only, root + read_only)
    os.chroot(root)
    os.chdir(working_dir)
    if is_root:
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    os.execvp(program[0], program)


def mount(*arguments: str) -> None:
    subprocess.run(["/usr/bin/mount", *arguments], check=True)


if __name__ == "__main__":
    become(*sys.argv[1:5], sys.argv[6:])
