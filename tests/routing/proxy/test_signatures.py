"""Signed configurations (S14): taken from who has the key alone, at their time alone, and not in any other form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.proxy.config_store import ConfigStore, NackError, Source
from routing.proxy.last_known_good import SKEW_S, LastKnownGood, Signatures
from routing.schema import ConfigError, RouterConfig, dump_snapshot, key_id, load_snapshot, sign_document
from routing.settings import SettingsError, read_settings
from tests.routing.proxy.swaps import ready
from tests.routing.schema.damage import CONFIG

NOW = 1_900_000_000
HOUR_S = 3600
BODY = msgspec.convert(CONFIG, RouterConfig)
OURS, NEXT, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))


def public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def document(
    revision: int = 7, *, key: Ed25519PrivateKey = OURS, issued_at: int = NOW, body: RouterConfig = BODY
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


def store(folder: Path | None = None, *, keys: Sequence[Ed25519PrivateKey] = (OURS,), now: float = NOW) -> ConfigStore:
    return ConfigStore(ready, LastKnownGood(folder) if folder else None, checks(*keys, now=now))


async def refused(taker: ConfigStore, what: bytes) -> tuple[str, str]:
    """Where and why; what runs goes on."""
    before = taker.applied
    with pytest.raises(NackError) as nack:
        await taker.apply(what, Source.PUSH)
    assert taker.applied == before
    return nack.value.path, nack.value.reason


def changed(what: bytes, **fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(what), **fields})


GOOD = document()
SIGNED = load_snapshot(GOOD)


@settings(max_examples=400, deadline=None)
@given(bit=st.integers(0, len(GOOD) * 8 - 1))
def test_with_any_bit_flipped_it_is_refused_or_means_the_same(bit: int) -> None:
    altered = bytearray(GOOD)
    altered[bit // 8] ^= 1 << bit % 8
    try:
        taken = load_snapshot(bytes(altered))
        checks(OURS).check_pushed(taken)
    except ConfigError as error:
        assert error.reason  # noqa: PT017 - the other outcome is checked below
        return
    assert (taken.revision, taken.sha256, taken.config, taken.signature) == (7, SIGNED.sha256, BODY, SIGNED.signature)


@given(data=st.data())
def test_with_any_field_altered_it_is_refused(data: st.DataObject) -> None:
    """Whoever has no key may choose every field and make the digest fit; the signature does not."""
    tree = msgspec.json.decode(GOOD)
    name = data.draw(st.sampled_from(["revision", "config", "key", "issued_at", "expires_at", "value"]))
    signature = tree["signature"]
    match name:
        case "revision":
            tree["revision"] = data.draw(st.integers(1, 2**53).filter(lambda number: number != tree["revision"]))
        case "config":
            other = msgspec.structs.replace(
                BODY, hash_secret=data.draw(st.text("0123456789abcdef", min_size=64, max_size=64))
            )
            tree |= {k: v for k, v in msgspec.json.decode(dump_snapshot(other, 7).document).items() if k != "signature"}
        case "key":
            signature["key"] = data.draw(st.sampled_from([key_id(public(NEXT)), key_id(public(STRANGER)), "0" * 16]))
        case "issued_at" | "expires_at":
            signature[name] = data.draw(st.integers(NOW, 2**53).filter(lambda at: at != signature[name]))
        case "value":
            signature["value"] = data.draw(st.binary(min_size=64, max_size=64)).hex()
    snapshot = load_snapshot(msgspec.json.encode(tree))
    with pytest.raises(ConfigError) as error:
        checks(OURS, NEXT).check_pushed(snapshot)
    assert error.value.path.startswith("$.signature")


async def test_what_is_refused_is_refused_with_where_and_why() -> None:
    unsigned = dump_snapshot(BODY, 9).document
    cases = {
        "$.signature": (unsigned, "not signed"),
        "$.signature.key": (document(9, key=STRANGER), f"this router accepts {key_id(public(OURS))}"),
        "$.signature.value": (changed(document(9), revision=10), "altered"),
        "$.signature.expires_at": (document(9, issued_at=NOW - HOUR_S - SKEW_S - 1), "expired"),
        "$.revision": (document(6), "older than the running one, 7"),
    }
    taker = store()
    await taker.apply(GOOD, Source.PUSH)
    for path, (what, reason) in cases.items():
        where, why = await refused(taker, what)
        assert (where, reason in why) == (path, True), why
    assert taker.revision == 7


async def test_of_two_keys_either_will_do_while_one_takes_the_place_of_the_other() -> None:
    taker = store(keys=(OURS, NEXT))
    await taker.apply(document(1), Source.PUSH)
    await taker.apply(document(2, key=NEXT), Source.PUSH)
    assert taker.signature == {"state": "verified", "key": key_id(public(NEXT)), "expires_at": NOW + HOUR_S}

    later = store(keys=(NEXT,))
    assert (await refused(later, document(3)))[0] == "$.signature.key"


async def test_the_same_configuration_with_a_later_signature_is_kept_and_with_an_earlier_one_is_not(
    tmp_path: Path,
) -> None:
    taker = store(tmp_path)
    first = await taker.apply(document(issued_at=NOW - 60), Source.PUSH)
    renewed = await taker.apply(GOOD, Source.PUSH)
    assert (renewed.at, renewed.source) == (first.at, first.source)  # nothing was put in force anew
    await taker.apply(document(issued_at=NOW - 30), Source.PUSH)
    assert taker.signature is not None
    assert taker.signature["expires_at"] == NOW + HOUR_S
    assert LastKnownGood(tmp_path).load()[0] == GOOD


async def test_what_lies_on_disk_is_served_after_its_time_and_not_without_its_signature(tmp_path: Path) -> None:
    """The control plane may be away for longer than a signature holds: nobody is without service for that."""
    await store(tmp_path).apply(GOOD, Source.PUSH)
    late = store(tmp_path, now=NOW + 10 * HOUR_S)
    await late.start(None)
    assert (late.revision, late.signature) == (7, {**SIGNED_TOLD, "state": "expired"})

    LastKnownGood(tmp_path).save(dump_snapshot(BODY, 8).document)  # somebody got at the disk
    again = store(tmp_path)
    await again.start(None)
    assert again.revision == 7  # the one before it

    stranger = store(tmp_path, keys=(STRANGER,))
    await stranger.start(None)
    assert stranger.revision is None


SIGNED_TOLD = {"state": "verified", "key": key_id(public(OURS)), "expires_at": NOW + HOUR_S}


async def test_without_keys_nobody_looks_at_signatures_and_a_file_is_believed_with_them() -> None:
    open_one = store(keys=())
    for what in (dump_snapshot(BODY, 1).document, document(2, key=STRANGER)):
        await open_one.apply(what, Source.PUSH)
    assert open_one.signature is not None
    assert open_one.signature["state"] == "unchecked"

    of_a_file = store()
    await of_a_file.start(dump_snapshot(BODY, 1).document)
    assert of_a_file.signature == {"state": "unsigned", "key": None, "expires_at": None}
    assert (await refused(of_a_file, dump_snapshot(BODY, 2).document))[0] == "$.signature"


@pytest.mark.parametrize(
    "what",
    [document(key=STRANGER, issued_at=NOW + 60), changed(document(6, issued_at=NOW + 60), revision=7)],
    ids=["another's key", "altered"],
)
async def test_what_a_file_claims_of_its_signature_is_not_believed(what: bytes) -> None:
    taker = store()
    await taker.start(what)
    assert taker.signature == {"state": "unsigned", "key": None, "expires_at": None}
    await taker.apply(GOOD, Source.PUSH)  # the same configuration, and signed earlier than the file claims to be
    assert taker.signature == SIGNED_TOLD


def test_keys_are_read_from_the_environment_and_what_is_none_ends_the_start() -> None:
    arguments = ["--control-plane", "http://127.0.0.1:8000"]
    given_keys = f"{public(OURS)}, {public(NEXT)}"
    assert read_settings(arguments, {"WARMPATH_ROUTER_CONFIG_KEYS": given_keys}).config_keys == (
        public(OURS),
        public(NEXT),
    )
    for wrong in ("secret", public(OURS)[:-2], public(OURS).upper(), f"{public(OURS)};{public(NEXT)}"):
        with pytest.raises(SettingsError, match="64 hex digits"):
            read_settings(arguments, {"WARMPATH_ROUTER_CONFIG_KEYS": wrong})
