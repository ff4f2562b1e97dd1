import pytest

from controlplane.encryption import decrypt, encrypt, keyed_digest, matches_digest
from controlplane.errors import DecryptionError


def test_encrypted_data_is_opaque_and_can_be_decrypted():
    encrypted = encrypt(b"a secret")
    assert b"secret" not in encrypted
    assert decrypt(encrypted) == b"a secret"
    assert encrypt(b"a secret") != encrypted


def test_altered_data_and_unknown_keys_are_rejected(settings):
    encrypted = encrypt(b"a secret")
    with pytest.raises(DecryptionError):
        decrypt(encrypted[:-4] + b"AAAA")
    former, settings.SECRET_KEY = settings.SECRET_KEY, "another" * 10
    with pytest.raises(DecryptionError, match="WARMPATH_SECRET_KEY_FALLBACKS"):
        decrypt(encrypted)
    settings.SECRET_KEY_FALLBACKS = [former]
    assert decrypt(encrypted) == b"a secret"


def test_a_digest_depends_on_value_and_purpose():
    digest = keyed_digest("api token", "x")
    assert matches_digest("api token", "x", digest)
    assert not matches_digest("api token", "y", digest)
    assert not matches_digest("another", "x", digest)
