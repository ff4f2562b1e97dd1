"""API tokens."""

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.errors import ConflictError, InvalidError
from controlplane.models import ApiToken, Scope
from controlplane.services.access.tokens import create_token, find_token, record_use, revoke_token

pytestmark = pytest.mark.django_db


@pytest.fixture
def token_and_text(operator):
    return create_token(operator, name="ci", scopes=[Scope.READ])


def test_a_token_is_found_by_its_text(token_and_text):
    token, text = token_and_text
    assert find_token(text) == token
    assert text.startswith(f"wp_{token.key_id}.")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text[:-1] + ("A" if text[-1] != "A" else "B"),
        lambda text: text.upper(),
        lambda text: "wp_" + "0" * 16 + text[19:],
        lambda text: text + "A",
        lambda text: " " + text,
        lambda _: "",
        lambda _: "wp_.",
    ],
)
def test_any_other_text_finds_no_token(token_and_text, change):
    assert find_token(change(token_and_text[1])) is None


def test_the_secret_is_not_stored(token_and_text):
    secret = token_and_text[1].partition(".")[2]
    with connection.cursor() as cursor:
        for table in ("controlplane_apitoken", "controlplane_event"):
            cursor.execute(f"select count(*) from {table} where {table}::text like %s", [f"%{secret}%"])
            assert cursor.fetchone() == (0,)


def test_a_token_that_is_revoked_expired_or_of_a_disabled_user_is_invalid(operator, token_and_text):
    token, text = token_and_text
    ApiToken.objects.update(expires_at=timezone.now())
    assert find_token(text) is None
    ApiToken.objects.update(expires_at=None)
    operator.is_active = False
    operator.save()
    assert find_token(text) is None
    operator.is_active = True
    operator.save()
    assert find_token(text) == token
    revoke_token(token)
    assert find_token(text) is None
    with pytest.raises(ConflictError):
        revoke_token(token)


def test_only_a_token_that_is_used_survives_a_change_of_the_secret_key(token_and_text, operator, settings):
    _, unused = create_token(operator, name="forgotten", scopes=[Scope.READ])
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "a-new-key" * 8, [settings.SECRET_KEY]
    assert find_token(token_and_text[1]) == token_and_text[0]
    settings.SECRET_KEY_FALLBACKS = []
    assert find_token(token_and_text[1]) == token_and_text[0]
    assert find_token(unused) is None


def test_use_is_recorded_once_a_minute(token_and_text, time_machine_at, django_assert_num_queries):
    record_use(token_and_text[0])
    token = ApiToken.objects.get()
    assert token.last_used_at is not None
    with django_assert_num_queries(0):
        record_use(token)
    time_machine_at(61)
    record_use(token)
    assert ApiToken.objects.get().last_used_at > token.last_used_at


def test_a_token_needs_a_scope_and_an_expiry_in_the_future(operator):
    with pytest.raises(InvalidError):
        create_token(operator, name="ci", scopes=[])
    with pytest.raises(InvalidError):
        create_token(operator, name="ci", scopes=[Scope.READ], expires_at=timezone.now())
