"""Builds the container images ``warmpath-controlplane`` and ``warmpath-router`` without a container engine.

Theory of operation. An image has three layers, each built as a folder (a tree) and archived:

1. ``base``      Debian's C library, Python, certificates and time zones, unpacked from pinned packages; no shell, no
                 package manager;
2. ``packages``  ``/opt/venv``: the wheels of requirements/semantic.txt or controlplane.txt, by hash;
3. ``warmpath``  ``/opt/warmpath``: our compiled wheel, for the control plane also templates and collected static
                 files; ``/usr/share/doc/warmpath``: bill of materials and licences.

Bytecode is compiled by the image's own Python, run through its own loader, so the result does not depend on the Python
that runs this. The first two layers are kept in ``.programs/images`` while their inputs stay the same. Only the
standard library.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from compiled import DIST, SOURCE_DATE_EPOCH, TAG, compiled_wheel, install_build_packages
from environment import LOCKS, ROOT, exclusive, step
from images import components as parts
from images import debian, oci, trees
from images.contents import IMAGES, SPECIAL, Image
from images.digests import sha256_of, sha256_of_all
from images.python_packages import Wheel, download
from programs import PROGRAMS

CACHE = PROGRAMS / "images"
OUTPUT = DIST / "images"
CREATED = datetime.fromtimestamp(SOURCE_DATE_EPOCH, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
FAILED = 1  # exit status; the message says what to do


@dataclass(frozen=True)
class Options:
    """How to build."""

    latest: bool  # the newest Debian packages instead of the locked ones
    fresh: bool  # build kept layers again
    root: Path | None  # only write the root file system there


def build_images(arguments: Sequence[str]) -> int:
    """Build the named images, or both; the exit status."""
    parser = argparse.ArgumentParser(prog="bootstrap.py images", description="Build container images.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(IMAGES)}; default: both")
    parser.add_argument("--latest", action="store_true", help="use the newest Debian packages, not the locked ones")
    parser.add_argument("--fresh", action="store_true", help="build all layers again")
    parser.add_argument("--lock", action="store_true", help="write debian.lock from the newest Debian packages")
    parser.add_argument("--root", type=Path, metavar="DIR", help="write the files of one image there, and no image")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(IMAGES):
        parser.error(f"unknown image {', '.join(sorted(unknown))}")
    try:
        if options.lock:
            debian.write_lock(debian.newest(list(debian.read_base().packages)))
            return 0
        CACHE.mkdir(parents=True, exist_ok=True)
        with exclusive(CACHE / "lock"):
            wanted = [IMAGES[name] for name in options.names or IMAGES]
            _build(wanted, Options(options.latest, options.fresh, options.root))
    except (debian.StaleLockError, parts.LicenceError, UnsuitablePythonError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    return 0


class UnsuitablePythonError(Exception):
    """The Python that runs this compiles for another version than the images have."""


def _build(images: Sequence[Image], options: Options) -> None:
    base = debian.read_base()
    if f"cp{base.python.replace('.', '')}" != TAG:
        raise UnsuitablePythonError(f"the images have Python {base.python}: run make images PYTHON=python{base.python}")
    wheel, build_python = compiled_wheel(), install_build_packages()
    packages = debian.newest(list(base.packages)) if options.latest else debian.read_lock()
    for image in images:
        _Build(base, packages, wheel, build_python, options).write(image)


class _Build:
    """The build of one image after another from the same base."""

    def __init__(
        self,
        base: debian.Base,
        packages: Sequence[debian.DebianPackage],
        wheel: Path,
        build_python: Path,
        options: Options,
    ) -> None:
        self._base = base
        self._packages = packages
        self._wheel = wheel
        self._build_python = build_python
        self._options = options
        self._inputs = sorted(Path(__file__).parent.glob("*.py")), f"{SOURCE_DATE_EPOCH} {base}"

    def write(self, image: Image) -> None:
        base = self._base_tree
        wheels = self._wheels(image)
        packages = self._packages_tree(image, wheels, base)
        components = self._components(image, wheels, base)
        parts.check_licences(components)
        version = _version(self._wheel)
        bill = parts.bill_of_materials(image.name, version, CREATED, components)
        texts = parts.licence_texts(components)
        ours = trees.rebuilt(CACHE / f"{image.short_name}-warmpath")
        trees.warmpath_tree(ours, self._wheel, image, trees.Interpreter(base, packages, self._base.python))
        trees.add_documents(ours, {"sbom.cdx.json": bill, "THIRD-PARTY-LICENCES.txt": texts})
        if self._options.root:
            trees.join([base, packages, ours], self._options.root)
        else:
            self._write_image(image, version, [base, packages, ours], {"sbom.cdx.json": bill, "licences.txt": texts})

    def _write_image(self, image: Image, version: str, folders: Sequence[Path], documents: dict[str, str]) -> None:
        OUTPUT.mkdir(parents=True, exist_ok=True)
        with step(f"Archiving {image.name}"):
            layers = [self._layer(folder, keep=folder is not folders[-1]) for folder in folders]
            config = oci.image_config(
                layers, image.config(version), created=CREATED, architecture=self._base.architecture
            )
            target = OUTPUT / f"{image.name}-{version}-{self._base.architecture}"
            digest = oci.write_image(Path(f"{target}.oci.tar"), image.name, version, layers, config)
        for suffix, text in documents.items():
            Path(f"{target}.{suffix}").write_text(text)
        print(f"  {target.relative_to(ROOT)}.oci.tar {digest}", flush=True)

    def _layer(self, folder: Path, *, keep: bool) -> oci.Layer:
        path = folder.with_name(f"{folder.name}.tar.gz")
        if keep and not self._options.fresh and (saved := oci.saved_layer(path)):
            return saved
        layer = oci.write_layer(folder, path, mtime=SOURCE_DATE_EPOCH, special=SPECIAL)
        oci.save_layer(layer)
        return layer

    # --- trees -----------------------------------------------------------------------------------------------

    @cached_property
    def _base_tree(self) -> Path:
        pins = [f"{package.pin} {package.sha256}" for package in self._packages]
        tree = CACHE / f"base-{self._key(*pins)}"
        if self._is_kept(tree):
            return tree
        archives = debian.archives(self._packages, CACHE / "debs")
        with step("Unpacking Debian's packages"), trees.built(tree) as partial:
            for package, archive in archives.items():
                debian.unpack(archive, package.name, self._base, partial)
            trees.complete_base(partial, self._base.python)
        return tree

    def _packages_tree(self, image: Image, wheels: Sequence[Wheel], base: Path) -> Path:
        tree = CACHE / f"{image.short_name}-packages-{self._key(base.name, *(wheel.path.name for wheel in wheels))}"
        if self._is_kept(tree):
            return tree
        with step(f"Unpacking the packages of {image.name}"), trees.built(tree) as partial:
            interpreter = trees.Interpreter(base, None, self._base.python)
            trees.packages_tree(partial, [wheel.path for wheel in wheels], interpreter)
        return tree

    def _is_kept(self, tree: Path) -> bool:
        return tree.is_dir() and not self._options.fresh

    def _key(self, *inputs: str) -> str:
        return sha256_of_all(self._inputs[0], self._inputs[1], *inputs)[:16]

    # --- components ------------------------------------------------------------------------------------------

    def _wheels(self, image: Image) -> list[Wheel]:
        lock = LOCKS / f"{image.lock}.txt"
        (python,) = (package for package in self._packages if package.name == f"python{self._base.python}-minimal")
        version = re.split(r"[^\d.]", python.version)[0]
        cache = CACHE / f"wheels-{image.short_name}-{sha256_of_all([lock], version)[:16]}"
        return download(lock, version, cache, self._build_python)

    def _components(self, image: Image, wheels: Sequence[Wheel], base: Path) -> list[parts.Component]:
        of_debian = [parts.debian_component(package, self._base, base) for package in self._packages]
        of_python = [parts.python_component(wheel, sha256_of(wheel.path)) for wheel in wheels]
        return [*of_debian, *of_python, *(parts.javascript_components() if image.has_pages else [])]


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1]
