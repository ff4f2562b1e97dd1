import pytest

from controlplane.encryption import keyed_digest, matches_digest, seal, unseal
from controlplane.errors import SealBrokenError


def test_what_is_sealed_is_read_again_and_shows_nothing():
    sealed = seal(b"a secret")
    assert b"secret" not in sealed
    assert unseal(sealed) == b"a secret"
    assert seal(b"a secret") != sealed


def test_what_was_altered_or_sealed_under_a_lost_key_is_refused_and_says_what_to_do(settings):
    sealed = seal(b"a secret")
    with pytest.raises(SealBrokenError):
        unseal(sealed[:-4] + b"AAAA")
    former, settings.SECRET_KEY = settings.SECRET_KEY, "another" * 10
    with pytest.raises(SealBrokenError, match="WARMPATH_SECRET_KEY_FALLBACKS"):
        unseal(sealed)
    settings.SECRET_KEY_FALLBACKS = [former]
    assert unseal(sealed) == b"a secret"


def test_a_digest_is_of_one_value_for_one_purpose():
    digest = keyed_digest("api token", "x")
    assert matches_digest("api token", "x", digest)
    assert not matches_digest("api token", "y", digest)
    assert not matches_digest("another", "x", digest)
