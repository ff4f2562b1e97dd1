"""Configurations are activated whole or not at all, survive restarts, and are signed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from routing.proxy.config_store import (
    CURRENT,
    PREVIOUS,
    SKEW_S,
    ConfigStore,
    LastKnownGood,
    NackError,
    RetryLaterError,
    Signatures,
    Source,
    Swap,
)
from routing.schema import (
    ConfigError,
    LoadedSnapshot,
    RouterConfig,
    dump_snapshot,
    key_id,
    load_snapshot,
    sign_document,
)
from routing.settings import SettingsError, read_settings
from tests.fakes.replica import Call, sse
from tests.routing.proxy.harness import CHAT, Harness, config, get, post, ready, routed
from tests.routing.schema.damage import CONFIG


async def running_revision(harness: Harness) -> int | None:
    _, shown = await harness.admin("GET", "/admin/config")
    return shown["revision"]


async def test_without_a_configuration_requests_get_503():
    async with routed(None) as harness:
        response = await harness.chat()
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert (await harness.send(get(b"/health"))).status == 503
        assert await harness.admin("GET", "/readyz") == (
            503,
            {"status": "not_ready", "reason": "no configuration yet"},
        )


async def test_a_pushed_configuration_is_acknowledged_and_active(two):
    async with routed(None) as harness:
        status, ack = await harness.push(config(two[:1]), 4)
        assert (status, ack["status"], ack["revision"]) == (200, "ack", 4)
        assert (await harness.chat()).replica == "replica-0"
        assert await harness.admin("GET", "/readyz") == (200, {"status": "ready", "revision": 4})
        _, shown = await harness.admin("GET", "/admin/config")
        assert (shown["sha256"], shown["source"], shown["applied_at"]) == (ack["sha256"], "push", ack["applied_at"])
        assert shown["config"]["hash_secret"] == "***"

        assert (await harness.push(config(two[1:]), 5))[0] == 200
        assert (await harness.chat()).replica == "replica-1"


async def test_a_pool_without_replicas_is_accepted(two):
    async with routed(config([])) as harness:
        assert (await harness.chat()).status == 503
        assert (await harness.push(config(two), revision=2))[0] == 200
        assert (await harness.chat()).status == 200
        assert (await harness.push(config([]), revision=3))[0] == 200
        assert (await harness.chat()).status == 503


async def test_a_push_that_cannot_be_checked_now_is_not_rejected(replica, monkeypatch):
    async def fails(*_: object) -> None:
        raise RetryLaterError("no worker is running")

    async with routed(config([replica]), revision=3) as harness:
        monkeypatch.setattr(ConfigStore, "apply", fails)
        document = dump_snapshot(config([replica]), 4).document
        async with harness.http.put(harness.server.admin_url + "/admin/config", data=document) as response:
            said = await response.json()
        assert (response.status, response.headers["Retry-After"]) == (503, "2")
        assert said == {"status": "not_now", "reason": "no worker is running", "running_revision": 3}
        _, shown = await harness.admin("GET", "/admin/config")
        assert shown["last_nack"] is None


async def test_an_older_revision_never_replaces_a_newer_one(two):
    async with routed(config(two[:1]), revision=5) as harness:
        for snapshot, revision in ((config(two[1:]), 4), (config(two[1:]), 5)):
            status, nack = await harness.push(snapshot, revision)
            assert (status, nack["status"], nack["running_revision"]) == (409, "nack", 5)
            assert nack["path"] == "$.revision"
        status, again = await harness.push(config(two[:1]), 5)
        assert (status, again["status"]) == (200, "ack")
        assert (await harness.chat()).replica == "replica-0"


def altered(document: bytes, **fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(document), **fields})


async def test_an_invalid_configuration_is_rejected_with_path_and_reason(two):
    good = dump_snapshot(config(two), 9).document
    body = json.loads(good)["config"]
    twice = {**body, "pools": body["pools"] * 2}
    unknown = {**body, "colour": "blue"}
    invalid = {
        b"": "$",
        b"{": "$",
        b"[]": "$",
        good[:-20]: "$",
        altered(good, schema=99): "$.schema",
        altered(good, sha256="0" * 64): "$.sha256",
        altered(good, revision=0): "$.revision",
        altered(good, config=twice, sha256=None): "$.sha256",
        json.dumps({"revision": 9, "config": twice}).encode(): "$.pools",
        json.dumps({"revision": 9, "config": unknown}).encode(): "$",
        b"[" * 100_000: "$",
    }
    async with routed(config(two[:1]), revision=3) as harness:
        for document, path in invalid.items():
            status, nack = await harness.admin("PUT", "/admin/config", data=document)
            assert (status, nack["status"], nack["path"], nack["running_revision"]) == (422, "nack", path, 3), document
            assert nack["reason"]
            assert await running_revision(harness) == 3
        _, shown = await harness.admin("GET", "/admin/config")
        assert set(shown["last_nack"]) == {"revision", "path", "reason", "at"}
        assert (await harness.chat()).status == 200


async def test_a_request_keeps_its_configuration_and_its_replica(two):
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin_stream(sse({"n": 1}))
        await go.wait()
        await call.end_stream(sse({"n": 2}))

    two[0].script = script
    async with routed(config(two[:1]), revision=1) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await two[0].wait_calls(1)
        await harness.push(config(two[1:]), 2)
        (old,) = harness.router._retired
        assert (old.name, old.connections) == ("replica-0", 1)
        go.set()
        assert (await client.read_response()).body == sse({"n": 1}) + sse({"n": 2})
        assert old.connections == 0  # not kept for another request


# --- on disk -----------------------------------------------------------------------------------------
async def test_a_router_starts_with_its_last_configuration(two, tmp_path):
    """A router serves without its control plane."""
    async with routed(None, state_dir=tmp_path) as harness:
        await harness.push(config(two[:1]), 6)
    assert (tmp_path / CURRENT).stat().st_mode & 0o077 == 0
    async with routed(None, state_dir=tmp_path) as harness:
        _, shown = await harness.admin("GET", "/admin/config")
        assert (shown["revision"], shown["source"]) == (6, "last_known_good")
        assert (await harness.chat()).replica == "replica-0"


async def test_a_file_wins_over_the_stored_configuration_unless_that_is_newer(two, tmp_path):
    for revision, expected in ((5, 5), (4, 5), (5, 5), (7, 7)):
        async with routed(config(two), revision=revision, state_dir=tmp_path) as harness:
            assert await running_revision(harness) == expected


async def test_the_newer_stored_configuration_is_used_whichever_was_written_last(replica, tmp_path):
    """Two routers that share a folder by mistake leave such files."""
    for revision in (9, 8):
        LastKnownGood(tmp_path).save(dump_snapshot(config([replica]), revision).document)
    store = ConfigStore(ready, LastKnownGood(tmp_path))
    await store.start(None)
    assert store.revision == 9


@pytest.mark.parametrize(("runs", "expected"), [({7, 8, 9}, 9), ({7, 8}, 8), ({7}, 7), (set(), None)])
@pytest.mark.parametrize("named", [None, 7])
async def test_a_stored_configuration_that_cannot_be_activated_is_skipped(runs, expected, named, replica, tmp_path):
    """A router without a file waits for a push; one with a file fails."""

    async def prepare(snapshot: LoadedSnapshot) -> Swap:
        if snapshot.revision not in runs:
            raise ValueError("no room")
        return await ready(snapshot)

    def document(revision: int) -> bytes:
        return dump_snapshot(config([replica]), revision).document

    for revision in (8, 9):
        LastKnownGood(tmp_path).save(document(revision))
    store = ConfigStore(prepare, LastKnownGood(tmp_path))
    if named is None and expected == 7:
        expected = None
    if named is not None and expected is None:
        with pytest.raises(NackError, match="no room"):
            await store.start(document(named))
    else:
        await store.start(None if named is None else document(named))
    assert store.revision == expected
    assert (store.last_nack is None) == (expected == 9)


async def test_a_push_that_cannot_be_stored_is_not_acknowledged(replica, tmp_path):
    blocked = tmp_path / "state"
    blocked.write_text("a file where the folder should be")
    async with routed(None, state_dir=blocked) as harness:
        status, nack = await harness.push(config([replica]), 1)
        assert (status, nack["status"], await running_revision(harness)) == (422, "nack", None)


async def test_a_file_is_used_even_if_it_cannot_be_stored(replica, tmp_path, caplog):
    blocked = tmp_path / "state"
    blocked.write_text("a file where the folder should be")
    async with routed(config([replica]), revision=3, state_dir=blocked) as harness:
        assert (await harness.chat()).status == 200
        assert await running_revision(harness) == 3
    assert "last_known_good_not_written" in caplog.text


def test_a_process_that_cannot_serve_logs_the_reason(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"revision": 1, "config": {"pools": []}}')
    options = ["--port=0", "--admin-port=0", f"--config={file}", f"--state-dir={tmp_path / 'state'}", "--name=one"]
    ended = subprocess.run([sys.executable, "-m", "routing", "serve", *options], capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"hash_secret" in ended.stderr


# --- The last known good configuration on disk, and signatures of configurations ---


def test_a_full_disk_leaves_the_stored_documents(tmp_path):
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
def test_a_damaged_file_is_skipped_for_the_previous_one(damage, tmp_path):
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


def test_a_document_stays_even_if_the_folder_cannot_be_flushed(tmp_path, monkeypatch, caplog):
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


GOOD = document()


@given(data=st.data())
def test_any_altered_field_is_rejected(data):
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


async def test_rejections_have_path_and_reason():
    unsigned = dump_snapshot(BODY, 9).document
    cases = {
        "$.signature": (unsigned, "not signed"),
        "$.signature.key": (document(9, key=STRANGER), f"this router accepts {key_id(public(CURRENT_KEY))}"),
        "$.signature.value": (altered(document(9), revision=10), "altered"),
        "$.signature.expires_at": (document(9, issued_at=NOW - HOUR_S - SKEW_S - 1), "expired"),
        "$.revision": (document(6), "older than the active one, 7"),
    }
    taker = store()
    await taker.apply(GOOD, Source.PUSH)
    for path, (document_bytes, reason) in cases.items():
        where, why = await rejected(taker, document_bytes)
        assert (where, reason in why) == (path, True), why
    assert taker.revision == 7


async def test_either_of_two_keys_is_accepted():
    taker = store(keys=(CURRENT_KEY, NEXT))
    await taker.apply(document(1), Source.PUSH)
    await taker.apply(document(2, key=NEXT), Source.PUSH)
    assert taker.signature == {"state": "verified", "key": key_id(public(NEXT)), "expires_at": NOW + HOUR_S}

    later = store(keys=(NEXT,))
    assert (await rejected(later, document(3)))[0] == "$.signature.key"


async def test_a_later_signature_of_the_same_configuration_is_stored(tmp_path):
    taker = store(tmp_path)
    first = await taker.apply(document(issued_at=NOW - 60), Source.PUSH)
    renewed = await taker.apply(GOOD, Source.PUSH)
    assert (renewed.at, renewed.source) == (first.at, first.source)  # nothing was activated
    await taker.apply(document(issued_at=NOW - 30), Source.PUSH)
    assert taker.signature is not None
    assert taker.signature["expires_at"] == NOW + HOUR_S
    assert LastKnownGood(tmp_path).load()[0] == GOOD


async def test_a_stored_configuration_is_used_after_expiry_but_not_without_signature(tmp_path):
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


async def test_without_keys_no_signature_is_checked_and_a_file_is_always_trusted():
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
    [document(key=STRANGER, issued_at=NOW + 60), altered(document(6, issued_at=NOW + 60), revision=7)],
    ids=["another's key", "altered"],
)
async def test_an_invalid_signature_of_a_file_is_not_reported_as_valid(document_bytes):
    taker = store()
    await taker.start(document_bytes)
    assert taker.signature == {"state": "unsigned", "key": None, "expires_at": None}
    await taker.apply(GOOD, Source.PUSH)  # the same configuration, signed earlier than the file claims
    assert taker.signature == SIGNED_TOLD


def test_keys_are_read_from_the_environment_and_validated():
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
