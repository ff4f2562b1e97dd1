import pytest
from django.db import connection
from django.utils import timezone

from controlplane.errors import ConflictError, InvalidError
from controlplane.models import ApiToken, Scope
from controlplane.services.access.tokens import create_token, find_token, record_use, revoke_token

pytestmark = pytest.mark.django_db


@pytest.fixture
def made(operator):
    return create_token(operator, name="ci", scopes=[Scope.READ])


def test_a_token_is_recognised_by_its_text_alone(made):
    token, text = made
    assert find_token(text) == token
    assert text.startswith(f"wp_{token.key_id}.")


@pytest.mark.parametrize(
    "spoil",
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
def test_any_other_text_is_nobody(made, spoil):
    assert find_token(spoil(made[1])) is None


def test_the_secret_is_nowhere_in_the_database(made):
    secret = made[1].partition(".")[2]
    with connection.cursor() as cursor:
        for table in ("controlplane_apitoken", "controlplane_event"):
            cursor.execute(f"select count(*) from {table} where {table}::text like %s", [f"%{secret}%"])
            assert cursor.fetchone() == (0,)


def test_a_revoked_expired_or_orphaned_token_is_nobody(operator, made):
    token, text = made
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


def test_a_token_that_is_used_outlives_a_change_of_the_secret_key_and_one_that_is_not_does_not(
    made, operator, settings
):
    _, unused = create_token(operator, name="forgotten", scopes=[Scope.READ])
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "a-new-key" * 8, [settings.SECRET_KEY]
    assert find_token(made[1]) == made[0]
    settings.SECRET_KEY_FALLBACKS = []
    assert find_token(made[1]) == made[0]
    assert find_token(unused) is None


def test_use_is_noted_once_a_minute(made, time_machine_at, django_assert_num_queries):
    record_use(made[0])
    token = ApiToken.objects.get()
    assert token.last_used_at is not None
    with django_assert_num_queries(0):
        record_use(token)
    time_machine_at(61)
    record_use(token)
    assert ApiToken.objects.get().last_used_at > token.last_used_at


def test_a_token_needs_a_scope_and_a_future(operator):
    with pytest.raises(InvalidError):
        create_token(operator, name="ci", scopes=[])
    with pytest.raises(InvalidError):
        create_token(operator, name="ci", scopes=[Scope.READ], expires_at=timezone.now())
