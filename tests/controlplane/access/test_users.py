"""Users and their roles."""

import pytest
from django.utils import timezone

from controlplane.errors import ConflictError, InvalidError, NameTakenError
from controlplane.models import ApiToken, AuditEntry, Role
from controlplane.services.access.users import add_user, set_active, set_password, set_role
from controlplane.services.fleet.pools import create_project, remove_project

PASSWORD = "a long enough passphrase"
pytestmark = pytest.mark.django_db


def test_a_new_user_sees_nothing_without_a_role(client):
    user = add_user("ada", password=PASSWORD)
    client.force_login(user)
    assert client.get("/").status_code == 403
    set_role(user, Role.VIEWER, None)
    assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"username": "a b", "password": PASSWORD}, "$.username"),
        ({"username": "", "password": PASSWORD}, "$.username"),
        ({"username": "ada", "password": "short"}, "$.password"),
        ({"username": "ada", "password": "qwerty123456"}, "$.password"),
        ({"username": "ada", "password": PASSWORD, "email": "x"}, "$.email"),
        ({"username": "ada", "password": "Warmpath-2026!"}, "$.password"),
        ({"username": "ada", "password": "vllm-router-1234"}, "$.password"),
        ({"username": "grace.hopper", "password": "grace.hopper.99"}, "$.password"),
    ],
)
def test_an_invalid_user_is_rejected_by_field(fields, path):
    with pytest.raises(InvalidError) as error:
        add_user(**fields)
    assert error.value.faults[0].path == path


def test_a_guessable_word_may_be_part_of_a_password():
    assert add_user("ada", password="our warmpath lives in a barn").pk
    assert add_user("al", password="always 7 elephants").pk


def test_usernames_are_unique():
    add_user("ada", password=PASSWORD)
    with pytest.raises(NameTakenError):
        add_user("ada", password=PASSWORD)


def test_the_last_admin_cannot_be_removed():
    ada, bob = add_user("ada", password=PASSWORD), add_user("bob", password=PASSWORD)
    set_role(ada, Role.ADMIN, None)
    for remove_admin in (
        lambda: set_role(ada, Role.VIEWER, None),
        lambda: set_role(ada, None, None),
        lambda: set_active(ada, False),
    ):
        with pytest.raises(ConflictError):
            remove_admin()
    set_role(bob, Role.ADMIN, None)
    set_role(ada, None, None)
    assert not ada.roles.exists()


def test_a_new_password_ends_existing_sessions(client):
    user = add_user("ada", password=PASSWORD)
    set_role(user, Role.VIEWER, None)
    client.force_login(user)
    set_password(user, "another long passphrase")
    assert client.get("/").status_code == 302


def test_a_project_without_pools_is_removed_with_its_roles(here):
    with pytest.raises(ConflictError):
        remove_project(here.project)
    project, user = create_project("short-lived"), add_user("ada", password=PASSWORD)
    set_role(user, Role.EDITOR, project)
    remove_project(project)
    assert not user.roles.exists()


def test_an_admin_adds_a_user_and_assigns_a_role(client, here, user_with):
    client.force_login(user_with("admin", everywhere=True))
    response = client.post("/users/new/", {"username": "ada", "password": PASSWORD}, follow=True)
    assert "sees nothing yet" in response.content.decode()
    user_path = response.request["PATH_INFO"]
    client.post(f"{user_path}role/", {"role": "editor", "project": here.project.pk})
    page = client.get("/users/").content.decode()
    assert "editor of here" in page
    assert AuditEntry.objects.filter(kind="role_changed", actor="admin-true").exists()


def test_a_password_is_never_shown_again(client, user_with, here):
    client.force_login(user_with("admin", everywhere=True))
    page = client.post("/users/new/", {"username": "a b", "password": PASSWORD}).content.decode()
    assert PASSWORD not in page


def test_a_user_creates_a_token_that_is_shown_once(client, here, user_with):
    client.force_login(user_with("viewer"))
    response = client.post("/tokens/", {"name": "nightly", "scope": "read", "days": "7"}).content.decode()
    assert "wp_" in response
    assert "not shown again" in response
    page = client.get("/tokens/").content.decode()
    assert "nightly" in page
    assert "not shown again" not in page
    assert ">expired<" not in page
    ApiToken.objects.update(expires_at=timezone.now())
    assert ">expired<" in client.get("/tokens/").content.decode()


def test_only_admins_revoke_tokens_of_others(client, here, user_with):
    from controlplane.models import Scope
    from controlplane.services.access.tokens import create_token

    token, _ = create_token(user_with("editor"), name="theirs", scopes=[Scope.READ])
    client.force_login(user_with("viewer"))
    assert "theirs" not in client.get("/tokens/").content.decode()
    assert client.post(f"/tokens/{token.pk}/revoke/").status_code == 404
    client.force_login(user_with("admin", everywhere=True))
    client.post(f"/tokens/{token.pk}/revoke/")
    token.refresh_from_db()
    assert token.revoked_at is not None
