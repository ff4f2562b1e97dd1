"""Writes OCI images: layers as reproducible archives, and an image layout that every container engine loads.

https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class Layer:
    """A compressed layer on disk."""

    path: Path
    digest: str  # of the compressed file
    diff_id: str  # of the archive: the same whatever compressed it


def write_layer(tree: Path, path: Path, *, mtime: int, special: Mapping[str, tuple[int, int]]) -> Layer:
    """Archive a folder in a fixed order, with one time of change.

    All is root's and read-only for others, except what ``special`` gives another owner and mode.
    """
    with path.open("wb") as file:
        compressed = _Hashing(file)
        with gzip.GzipFile(filename="", mode="wb", fileobj=compressed, compresslevel=3, mtime=0) as archive:
            content = _Hashing(archive)
            with tarfile.open(fileobj=content, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                for entry in sorted(tree.rglob("*"), key=lambda entry: entry.relative_to(tree).parts):
                    _add(tar, entry, str(entry.relative_to(tree)), mtime, special)
    return Layer(path, compressed.digest, content.digest)


def _add(tar: tarfile.TarFile, path: Path, name: str, mtime: int, special: Mapping[str, tuple[int, int]]) -> None:
    item = tarfile.TarInfo(name)
    is_program = path.is_dir() or bool(path.lstat().st_mode & 0o100)
    owner, item.mode = special.get(name, (0, 0o755 if is_program else 0o644))
    item.mtime, item.uid, item.gid = mtime, owner, owner
    content = b""
    if path.is_symlink():
        item.type, item.mode, item.linkname = tarfile.SYMTYPE, 0o777, str(path.readlink())
    elif path.is_dir():
        item.type = tarfile.DIRTYPE
    else:
        content = path.read_bytes()
        item.size = len(content)
    tar.addfile(item, io.BytesIO(content))


class _Hashing(io.RawIOBase):
    """A file that computes the digest of what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        return self._file.write(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha256.hexdigest()}"


# --- layout ------------------------------------------------------------------------------------------------------


def image_config(
    layers: Sequence[Layer], config: Mapping[str, Any], *, created: str, architecture: str
) -> dict[str, Any]:
    """The image's configuration. ``config`` is what an engine runs it with."""
    return {
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": layer.path.name.partition(".")[0]} for layer in layers],
    }


def write_image(path: Path, name: str, tag: str, layers: Sequence[Layer], config: Mapping[str, Any]) -> str:
    """Write an image layout as one archive, with `docker save`'s index for older engines; the manifest's digest."""
    with tarfile.open(path, "w") as tar:
        blobs = _Blobs(tar)
        config_blob = blobs.add(CONFIG, _json(config))
        layer_blobs = [blobs.add_file(LAYER, layer) for layer in layers]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config_blob, "layers": layer_blobs}
        manifest_blob = blobs.add(MANIFEST, _json(manifest))
        names = {
            "org.opencontainers.image.ref.name": tag,
            # containerd stores this name as it is, and engines look for the whole one
            "io.containerd.image.name": f"docker.io/library/{name}:{tag}",
        }
        platform = {"architecture": config["architecture"], "os": config["os"]}
        entry = manifest_blob | {"annotations": names, "platform": platform}
        _add_bytes(tar, "index.json", _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}))
        _add_bytes(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        paths = [f"blobs/sha256/{blob['digest'].partition(':')[2]}" for blob in (config_blob, *layer_blobs)]
        _add_bytes(
            tar, "manifest.json", _json([{"Config": paths[0], "RepoTags": [f"{name}:{tag}"], "Layers": paths[1:]}])
        )
    return str(manifest_blob["digest"])


class _Blobs:
    """Adds content under its digest and returns its descriptor."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar

    def add(self, media_type: str, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        _add_bytes(self._tar, f"blobs/sha256/{digest}", content)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    def add_file(self, media_type: str, layer: Layer) -> dict[str, Any]:
        item = tarfile.TarInfo(f"blobs/sha256/{layer.digest.partition(':')[2]}")
        item.size = layer.path.stat().st_size
        with layer.path.open("rb") as file:
            self._tar.addfile(item, file)
        return {"mediaType": media_type, "digest": layer.digest, "size": item.size}


def _add_bytes(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    item = tarfile.TarInfo(name)
    item.size = len(content)
    tar.addfile(item, io.BytesIO(content))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def save_layer(layer: Layer) -> None:
    """Note the digests beside a layer, for ``saved_layer``."""
    _notes(layer.path).write_text(json.dumps(asdict(layer) | {"path": ""}))


def saved_layer(path: Path) -> Layer | None:
    """A layer of an earlier build; None if there is none."""
    if not path.exists() or not _notes(path).exists():
        return None
    return Layer(**json.loads(_notes(path).read_text()) | {"path": path})


def _notes(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
