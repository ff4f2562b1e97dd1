"""The last known good configuration on disk, and signatures of configurations."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.proxy.config_store import (
    CURRENT,
    PREVIOUS,
    SKEW_S,
    ConfigStore,
    LastKnownGood,
    NackError,
    Signatures,
    Source,
)
from routing.schema import ConfigError, RouterConfig, dump_snapshot, key_id, load_snapshot, sign_document
from routing.settings import SettingsError, read_settings
from tests.routing.proxy.harness import ready
from tests.routing.schema.damage import CONFIG

PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
WRITER = """
import sys
from pathlib import Path
from routing.proxy.config_store import LastKnownGood
files = LastKnownGood(Path(sys.argv[1]))
number = int(sys.argv[2])
print("ready", flush=True)
while len(sys.argv) == 3 or sys.stdin.readline():
    number += 1
    files.save(b"%d:" % number + b"x" * (number * 37 % 9000))
    print(number, flush=True)
"""


def test_a_full_disk_leaves_the_stored_documents(tmp_path: Path) -> None:
    files = LastKnownGood(tmp_path)
    files.save(b"first")
    files.save(b"second")
    fresh = tmp_path / f"{CURRENT}.new"
    fresh.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        files.save(b"third")
    assert files.load() == [b"second", b"first"]
    fresh.unlink()
    files.save(b"third")
    assert files.load() == [b"third", b"second"]


@pytest.mark.parametrize("damage", ["torn", "flipped", "emptied", "missing"])
def test_a_damaged_file_is_skipped_for_the_previous_one(damage: str, tmp_path: Path) -> None:
    files = LastKnownGood(tmp_path)
    assert files.load() == []
    files.save(b"first")
    files.save(b"second")
    assert files.load() == [b"second", b"first"]
    current = tmp_path / CURRENT
    data = current.read_bytes()
    if damage == "missing":
        current.unlink()
    else:
        current.write_bytes({"torn": data[:-1], "flipped": data[:-1] + b"X", "emptied": b""}[damage])
    assert files.load() == [b"first"]
    files.save(b"third")
    assert files.load() == [b"third", b"first"]
    (tmp_path / PREVIOUS).write_bytes(b"")
    current.write_bytes(b"")
    assert files.load() == []


def test_a_document_stays_even_if_the_folder_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, really_flush = LastKnownGood(tmp_path), os.fsync
    files.save(b"first")

    def flush(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        really_flush(handle)

    monkeypatch.setattr(os, "fsync", flush)
    files.save(b"second")
    assert files.load() == [b"second", b"first"]
    assert "not_flushed" in caplog.text


def test_killing_the_writer_leaves_a_whole_document(tmp_path: Path) -> None:
    chance = random.Random(5)
    files, saved = LastKnownGood(tmp_path), 0
    for _ in range(40):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(saved)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
        for _ in range(chance.randrange(1, 8)):
            saved = int(writer.stdout.readline())
        for _ in range(chance.randrange(20_000)):
            pass  # a random delay into a write
        writer.send_signal(signal.SIGKILL)
        reported = writer.stdout.read().split()  # communicate() would miss buffered lines
        writer.stdout.close()
        writer.wait(timeout=10)
        saved = int(reported[-1]) if reported else saved
        documents = files.load()
        numbers = [int(document.partition(b":")[0]) for document in documents]
        assert numbers[0] in {saved, saved + 1}
        assert all(
            document.partition(b":")[2] == b"x" * (n * 37 % 9000)
            for document, n in zip(documents, numbers, strict=True)
        )
        saved = numbers[0]


NOW = 1_900_000_000
HOUR_S = 3600
BODY = msgspec.convert(CONFIG, RouterConfig)
CURRENT_KEY, NEXT, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))


def public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def document(
    revision: int = 7, *, key: Ed25519PrivateKey = CURRENT_KEY, issued_at: int = NOW, body: RouterConfig = BODY
) -> bytes:
    return sign_document(
        dump_snapshot(body, revision).document,
        key=key_id(public(key)),
        issued_at=issued_at,
        expires_at=issued_at + HOUR_S,
        sign=key.sign,
    )


def checks(*keys: Ed25519PrivateKey, now: float = NOW) -> Signatures:
    return Signatures([public(key) for key in keys], lambda: now)


def store(
    folder: Path | None = None, *, keys: Sequence[Ed25519PrivateKey] = (CURRENT_KEY,), now: float = NOW
) -> ConfigStore:
    return ConfigStore(ready, LastKnownGood(folder) if folder else None, checks(*keys, now=now))


async def rejected(taker: ConfigStore, document_bytes: bytes) -> tuple[str, str]:
    """Path and reason of a rejection; the active configuration stays."""
    before = taker.applied
    with pytest.raises(NackError) as nack:
        await taker.apply(document_bytes, Source.PUSH)
    assert taker.applied == before
    return nack.value.path, nack.value.reason


def changed(document_bytes: bytes, **fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(document_bytes), **fields})


GOOD = document()
SIGNED = load_snapshot(GOOD)


@settings(max_examples=400, deadline=None)
@given(bit=st.integers(0, len(GOOD) * 8 - 1))
def test_a_flipped_bit_is_rejected_or_changes_nothing(bit: int) -> None:
    altered = bytearray(GOOD)
    altered[bit // 8] ^= 1 << bit % 8
    try:
        snapshot_read = load_snapshot(bytes(altered))
        checks(CURRENT_KEY).check_pushed(snapshot_read)
    except ConfigError as error:
        assert error.reason  # noqa: PT017 - the other outcome is checked below
        return
    assert (snapshot_read.revision, snapshot_read.sha256, snapshot_read.config, snapshot_read.signature) == (
        7,
        SIGNED.sha256,
        BODY,
        SIGNED.signature,
    )


@given(data=st.data())
def test_any_altered_field_is_rejected(data: st.DataObject) -> None:
    """Without the key every field and a matching digest can be forged, but not the signature."""
    tree = msgspec.json.decode(GOOD)
    name = data.draw(st.sampled_from(["revision", "config", "key", "issued_at", "expires_at", "value"]))
    signature = tree["signature"]
    match name:
        case "revision":
            tree["revision"] = data.draw(st.integers(1, 2**53).filter(lambda number: number != tree["revision"]))
        case "config":
            other_writer = msgspec.structs.replace(
                BODY, hash_secret=data.draw(st.text("0123456789abcdef", min_size=64, max_size=64))
            )
            tree |= {
                k: v
                for k, v in msgspec.json.decode(dump_snapshot(other_writer, 7).document).items()
                if k != "signature"
            }
        case "key":
            signature["key"] = data.draw(st.sampled_from([key_id(public(NEXT)), key_id(public(STRANGER)), "0" * 16]))
        case "issued_at" | "expires_at":
            signature[name] = data.draw(st.integers(NOW, 2**53).filter(lambda at: at != signature[name]))
        case "value":
            signature["value"] = data.draw(st.binary(min_size=64, max_size=64)).hex()
    snapshot = load_snapshot(msgspec.json.encode(tree))
    with pytest.raises(ConfigError) as error:
        checks(CURRENT_KEY, NEXT).check_pushed(snapshot)
    assert error.value.path.startswith("$.signature")


async def test_rejections_have_path_and_reason() -> None:
    unsigned = dump_snapshot(BODY, 9).document
    cases = {
        "$.signature": (unsigned, "not signed"),
        "$.signature.key": (document(9, key=STRANGER), f"this router accepts {key_id(public(CURRENT_KEY))}"),
        "$.signature.value": (changed(document(9), revision=10), "altered"),
        "$.signature.expires_at": (document(9, issued_at=NOW - HOUR_S - SKEW_S - 1), "expired"),
        "$.revision": (document(6), "older than the active one, 7"),
    }
    taker = store()
    await taker.apply(GOOD, Source.PUSH)
    for path, (document_bytes, reason) in cases.items():
        where, why = await rejected(taker, document_bytes)
        assert (where, reason in why) == (path, True), why
    assert taker.revision == 7


async def test_either_of_two_keys_is_accepted() -> None:
    taker = store(keys=(CURRENT_KEY, NEXT))
    await taker.apply(document(1), Source.PUSH)
    await taker.apply(document(2, key=NEXT), Source.PUSH)
    assert taker.signature == {"state": "verified", "key": key_id(public(NEXT)), "expires_at": NOW + HOUR_S}

    later = store(keys=(NEXT,))
    assert (await rejected(later, document(3)))[0] == "$.signature.key"


async def test_a_later_signature_of_the_same_configuration_is_stored(
    tmp_path: Path,
) -> None:
    taker = store(tmp_path)
    first = await taker.apply(document(issued_at=NOW - 60), Source.PUSH)
    renewed = await taker.apply(GOOD, Source.PUSH)
    assert (renewed.at, renewed.source) == (first.at, first.source)  # nothing was activated
    await taker.apply(document(issued_at=NOW - 30), Source.PUSH)
    assert taker.signature is not None
    assert taker.signature["expires_at"] == NOW + HOUR_S
    assert LastKnownGood(tmp_path).load()[0] == GOOD


async def test_a_stored_configuration_is_used_after_expiry_but_not_without_signature(tmp_path: Path) -> None:
    """A control plane that is down beyond the expiry stops no router."""
    await store(tmp_path).apply(GOOD, Source.PUSH)
    late = store(tmp_path, now=NOW + 10 * HOUR_S)
    await late.start(None)
    assert (late.revision, late.signature) == (7, {**SIGNED_TOLD, "state": "expired"})

    LastKnownGood(tmp_path).save(dump_snapshot(BODY, 8).document)  # the disk was manipulated
    again = store(tmp_path)
    await again.start(None)
    assert again.revision == 7  # the previous one

    stranger = store(tmp_path, keys=(STRANGER,))
    await stranger.start(None)
    assert stranger.revision is None


SIGNED_TOLD = {"state": "verified", "key": key_id(public(CURRENT_KEY)), "expires_at": NOW + HOUR_S}


async def test_without_keys_no_signature_is_checked_and_a_file_is_always_trusted() -> None:
    unchecked = store(keys=())
    for document_bytes in (dump_snapshot(BODY, 1).document, document(2, key=STRANGER)):
        await unchecked.apply(document_bytes, Source.PUSH)
    assert unchecked.signature is not None
    assert unchecked.signature["state"] == "unchecked"

    of_a_file = store()
    await of_a_file.start(dump_snapshot(BODY, 1).document)
    assert of_a_file.signature == {"state": "unsigned", "key": None, "expires_at": None}
    assert (await rejected(of_a_file, dump_snapshot(BODY, 2).document))[0] == "$.signature"


@pytest.mark.parametrize(
    "document_bytes",
    [document(key=STRANGER, issued_at=NOW + 60), changed(document(6, issued_at=NOW + 60), revision=7)],
    ids=["another's key", "altered"],
)
async def test_an_invalid_signature_of_a_file_is_not_reported_as_valid(document_bytes: bytes) -> None:
    taker = store()
    await taker.start(document_bytes)
    assert taker.signature == {"state": "unsigned", "key": None, "expires_at": None}
    await taker.apply(GOOD, Source.PUSH)  # the same configuration, signed earlier than the file claims
    assert taker.signature == SIGNED_TOLD


def test_keys_are_read_from_the_environment_and_validated() -> None:
    arguments = ["--control-plane", "http://127.0.0.1:8000"]
    given_keys = f"{public(CURRENT_KEY)}, {public(NEXT)}"
    assert read_settings(arguments, {"WARMPATH_ROUTER_CONFIG_KEYS": given_keys}).config_keys == (
        public(CURRENT_KEY),
        public(NEXT),
    )
    for wrong in (
        "secret",
        public(CURRENT_KEY)[:-2],
        public(CURRENT_KEY).upper(),
        f"{public(CURRENT_KEY)};{public(NEXT)}",
    ):
        with pytest.raises(SettingsError, match="64 hex digits"):
            read_settings(arguments, {"WARMPATH_ROUTER_CONFIG_KEYS": wrong})
