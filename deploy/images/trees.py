"""The folders that become layers: what is added to unpacked packages so that they run."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checks import PRODUCTION
from environment import ROOT, run_quietly
from images.contents import CODE, DOCUMENTS, PACKAGES, SPECIAL, USER, Image
from images.debian import MERGED
from images.python_packages import unpack

FOLDERS = ("dev", "etc/ssl/certs", "opt", "proc", "run/secrets", "sys", "tmp", "usr/lib/ssl", "var/lib/warmpath")
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/nonexistent\n"
    f"warmpath:x:{USER}:{USER}:Warmpath:/var/lib/warmpath:/nonexistent\n",
    "etc/group": f"root:x:0:\nwarmpath:x:{USER}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",  # engines mount their own
}
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True)
class Interpreter:
    """The images' Python, run from its tree by its own loader, which needs no privileges."""

    base: Path
    packages: Path | None  # tree of packages that it imports
    version: str

    def run(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        """Run a command line of Python in a folder; CalledProcessError with its output if it fails."""
        (libraries,) = (self.base / "usr/lib").glob("*-linux-gnu")
        (loader,) = libraries.glob("ld-linux-*.so.*")
        command = [str(loader), "--library-path", str(libraries), str(self.base / f"usr/bin/python{self.version}")]
        settings = {"PYTHONHOME": str(self.base / "usr"), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        if self.packages:
            settings["PYTHONPATH"] = f"{folder}:{self.packages / self.site_packages}"
        run_quietly([*command, *arguments], settings | dict(environment or {}), folder=folder)

    @property
    def site_packages(self) -> str:
        return f"{PACKAGES}/lib/python{self.version}/site-packages"

    def compile_bytecode(self, tree: Path, folder: str) -> None:
        """Compile a folder. Python never checks these files against their sources, so any time of change will do."""
        options = ["-q", "--invalidation-mode", "unchecked-hash", "-s", str(tree), "-p", "/"]
        self.run(["-m", "compileall", *options, str(tree / folder)], tree)


# --- layers ------------------------------------------------------------------------------------------------------


def complete_base(tree: Path, python: str) -> None:
    """Add to unpacked Debian packages what their maintainer scripts and a container need."""
    for name in MERGED:
        (tree / "usr" / name).mkdir(parents=True, exist_ok=True)
        (tree / name).symlink_to(f"usr/{name}")
    for name in ("python3", "python"):
        (tree / "usr/bin" / name).symlink_to(f"python{python}")
    for name in FOLDERS:
        (tree / name).mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (tree / name).write_text(text)
    certificates = sorted((tree / "usr/share/ca-certificates").rglob("*.crt"))
    (tree / CERTIFICATES).write_bytes(b"".join(path.read_bytes() for path in certificates))
    (tree / "usr/lib/ssl/cert.pem").symlink_to(f"/{CERTIFICATES}")
    (tree / "usr/lib/ssl/certs").symlink_to("/etc/ssl/certs")
    Interpreter(tree, None, python).compile_bytecode(tree, f"usr/lib/python{python}")


def packages_tree(tree: Path, wheels: Sequence[Path], interpreter: Interpreter) -> None:
    """A virtual environment with wheels installed."""
    programs, packages = tree / PACKAGES / "bin", tree / interpreter.site_packages
    for wheel in wheels:
        unpack(wheel, packages, programs, f"/{PACKAGES}/bin/python")
    (tree / PACKAGES / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for name in ("python", "python3"):
        (programs / name).symlink_to(f"/usr/bin/python{interpreter.version}")
    interpreter.compile_bytecode(tree, interpreter.site_packages)


def warmpath_tree(tree: Path, wheel: Path, image: Image, interpreter: Interpreter) -> None:
    """Our own code, and for the control plane what its pages need."""
    code = tree / CODE
    unpack(wheel, code, tree / PACKAGES / "bin", f"/{PACKAGES}/bin/python")
    for name in image.leave_out:
        path = tree / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    interpreter.compile_bytecode(tree, CODE)
    if image.has_pages:
        shutil.copytree(ROOT / "templates", code / "templates")
        shutil.copytree(ROOT / "static", code / "static")
        shutil.copy(ROOT / "manage.py", code)
        interpreter.run(["manage.py", "collectstatic", "--noinput"], code, PRODUCTION)
        shutil.rmtree(code / "static")
        (code / "static").mkdir()  # Django warns if it does not exist


def add_documents(tree: Path, documents: Mapping[str, str]) -> None:
    folder = tree / DOCUMENTS
    folder.mkdir(parents=True)
    for name, text in documents.items():
        (folder / name).write_text(text)


# --- folders -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def built(tree: Path) -> Iterator[Path]:
    """A new folder that gets this name if the block succeeds, and replaces those with another key at their end."""
    kind = tree.name.rpartition("-")[0]
    partial = rebuilt(tree.with_name(f"{kind}.partial"))
    yield partial
    for previous in tree.parent.glob(f"{kind}-*"):
        shutil.rmtree(previous) if previous.is_dir() else previous.unlink()
    partial.rename(tree)


def rebuilt(tree: Path) -> Path:
    """An empty folder of this name."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    return tree


def join(trees: Sequence[Path], target: Path) -> None:
    """Copy trees into one folder, with the permissions that they have in an image."""
    for tree in trees:
        shutil.copytree(tree, target, symlinks=True, dirs_exist_ok=True)
    for name, (owner, mode) in SPECIAL.items():
        (target / name).chmod(mode)
        if os.geteuid() == 0:
            os.chown(target / name, owner, owner)
