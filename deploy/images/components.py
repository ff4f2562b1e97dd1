"""What an image consists of, with licences: a CycloneDX bill of materials and a file with the licences' texts."""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from environment import ROOT
from images.debian import Base, DebianPackage
from images.python_packages import Wheel

LICENCES = tomllib.loads((Path(__file__).parent / "licences.toml").read_text())
VENDORED = ROOT / "static/vendor/README.md"


class LicenceError(Exception):
    """Components with an unknown licence, or one that is not allowed; one line for each."""


@dataclass(frozen=True)
class Component:
    """One part of an image."""

    name: str
    version: str
    purl: str  # its package URL, which scanners use
    licence: str | None  # an SPDX expression; None if unknown
    sha256: str  # of the package's archive
    texts: dict[str, str] = field(default_factory=dict)  # of its licences, by file name


def debian_component(package: DebianPackage, base: Base, root: Path) -> Component:
    purl = f"pkg:deb/debian/{quote(package.name)}@{quote(package.version)}"
    purl += f"?arch={base.architecture}&distro=debian-{base.version}"
    text = (root / "usr/share/doc" / package.name / "copyright").read_text("utf-8", "replace")
    licence = base.packages[package.name]["licence"]
    return Component(package.name, package.version, purl, licence, package.sha256, {"copyright": text})


def python_component(wheel: Wheel, sha256: str) -> Component:
    purl = f"pkg:pypi/{wheel.name}@{quote(wheel.version)}"
    return Component(wheel.name, wheel.version, purl, licence_of(wheel), sha256, wheel.licence_files)


def javascript_components() -> list[Component]:
    """The scripts in static/vendor, from the table of their versions."""
    rows = re.findall(r"^\| `[^`]+` \| `([^`]+)` \| ([\d.]+)[^|]*\| `(\w{64})` \|", VENDORED.read_text(), re.MULTILINE)
    return [
        Component(name, version, f"pkg:npm/{name}@{version}", LICENCES["javascript"].get(name), digest)
        for name, version, digest in rows
    ]


# --- licences ----------------------------------------------------------------------------------------------------


def licence_of(wheel: Wheel) -> str | None:
    """A package's licence: what licences.toml says, else its metadata's expression or names; None if unclear."""
    if stated := LICENCES["python"].get(wheel.name) or wheel.metadata["License-Expression"]:
        return str(stated)
    classifiers = [text.rpartition(" :: ")[2] for text in wheel.metadata.get_all("Classifier", []) if "License" in text]
    named = {_spdx(text) for text in [wheel.metadata["License"] or "", *classifiers]} - {None}
    return named.pop() if len(named) == 1 else None


def _spdx(text: str) -> str | None:
    return text if text in LICENCES["allowed"] else LICENCES["names"].get(text)


def is_allowed(expression: str) -> bool:
    """Whether one of the alternatives has only allowed licences. Expressions with parentheses are not."""
    allowed = LICENCES["allowed"]
    return any(all(part in allowed for part in choice.split(" AND ")) for choice in expression.split(" OR "))


def check_licences(components: Iterable[Component]) -> None:
    """LicenceError if a component's licence is unknown or not allowed."""
    problems = [
        f"{component.name} {component.version}: {component.licence or 'unknown licence'}"
        for component in components
        if component.name not in LICENCES["exceptions"]
        if component.licence is None or not is_allowed(component.licence)
    ]
    if problems:
        raise LicenceError("\n".join(problems))


def licence_texts(components: Sequence[Component]) -> str:
    """All components with their licences' texts, as one text file."""
    parts = ["Third-party components of this image, with their licences.\n"]
    for component in components:
        parts.append(f"{'=' * 80}\n{component.name} {component.version}\n{component.licence}\n")
        parts += [f"--- {name}\n{text.strip()}\n" for name, text in sorted(component.texts.items())]
    return "\n".join(parts)


# --- bill of materials -------------------------------------------------------------------------------------------


def bill_of_materials(image: str, version: str, created: str, components: Sequence[Component]) -> str:
    """A CycloneDX 1.6 document; the same for the same components."""
    subject = f"pkg:oci/{image}@{version}"
    identity = uuid.uuid5(uuid.NAMESPACE_URL, " ".join([subject, created, *(item.sha256 for item in components)]))
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{identity}",
        "version": 1,
        "metadata": {
            "timestamp": created,
            "component": {
                "type": "container",
                "bom-ref": subject,
                "name": image,
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
            },
        },
        "components": [_entry(component) for component in components],
        "dependencies": [{"ref": subject, "dependsOn": [component.purl for component in components]}],
    }
    return json.dumps(document, indent=1) + "\n"


def _entry(component: Component) -> dict[str, Any]:
    entry = {"type": "library", "bom-ref": component.purl, "name": component.name, "version": component.version}
    licences = [{"expression": component.licence}] if component.licence else []
    hashes = [{"alg": "SHA-256", "content": component.sha256}]
    return entry | {"purl": component.purl, "hashes": hashes, "licenses": licences}
