"""Pages of client keys, of whether they are needed, and of limits."""

import re

import pytest

from controlplane.models import ClientKey, FleetSettings, Role
from controlplane.services.access.users import set_role
from controlplane.services.fleet.client_keys import create_client_key
from controlplane.services.fleet.pools import create_project
from controlplane.services.fleet.task_groups import create_task_group


@pytest.fixture
def key(pool):
    create_task_group(pool, "chat")
    return create_client_key(pool.project, "agents", groups=["chat"], requests_per_s=5)[0]


def test_a_key_is_made_and_its_text_is_shown_once(visitor, pool):
    form = {"project": pool.project_id, "name": "agents", "requests_per_s": "5", "tenant": "red"}
    page = visitor.post("/client-keys/", form)
    (text,) = re.findall(r"<code>(wpk_[\w-]{43})</code>", page.text)
    assert page["Cache-Control"].startswith("max-age=0")
    key = ClientKey.objects.get()
    assert (key.requests_per_s, key.tenant, key.models, key.groups) == (5.0, "red", None, None)
    assert text not in visitor.get("/client-keys/").text + visitor.get(f"/client-keys/{key.pk}/").text


def test_a_key_may_end_by_itself_and_the_page_says_when_and_that_it_has(visitor, pool):
    form = {"project": pool.project_id, "name": "agents", "expires_at": "2090-03-04 12:00"}
    assert "4 Mar 2090 12:00 UTC" in visitor.post("/client-keys/", form).text
    wrong = visitor.post("/client-keys/", {**form, "name": "late", "expires_at": "2020-03-04 12:00"})
    assert (wrong.status_code, 'id="id_expires_at_error"' in wrong.text) == (422, True)
    ClientKey.objects.update(expires_at="2021-01-01T00:00:00Z")
    assert ">expired</span>" in visitor.get("/client-keys/").text


def test_errors_are_shown_at_their_fields(visitor, pool):
    form = {"project": pool.project_id, "name": "Agents", "requests_per_s": "0", "tokens_per_min": "many"}
    page = visitor.post("/client-keys/", form)
    assert page.status_code == 422
    for name in ("requests_per_s", "tokens_per_min"):
        assert f'id="id_{name}_error"' in page.text
    page = visitor.post("/client-keys/", {"project": pool.project_id, "name": "agents", "groups": "nobody"})
    assert 'id="id_groups_error"' in page.text
    assert not ClientKey.objects.exists()


def test_a_key_is_changed_and_revoked_after_saying_what_will_happen(visitor, key):
    page = visitor.get(f"/client-keys/{key.pk}/").text
    assert ">chat</textarea>" in page.replace("\n", "")
    visitor.post(f"/client-keys/{key.pk}/", {"groups": "", "requests_per_s": "7.5"})
    key.refresh_from_db()
    assert (key.groups, key.requests_per_s) == (None, 7.5)

    assert "cannot be restored" in visitor.get(f"/client-keys/{key.pk}/revoke/").text
    visitor.post(f"/client-keys/{key.pk}/revoke/")
    key.refresh_from_db()
    assert key.revoked_at is not None
    assert "revoked" in visitor.get("/client-keys/").text


def test_requiring_keys_first_says_what_will_happen(visitor, pool):
    asked = visitor.get("/client-keys/admission/").text
    assert "401" in asked
    assert "every request would be rejected" in asked
    create_client_key(pool.project, "agents")
    assert "1 client key exists" in visitor.get("/client-keys/admission/").text
    assert not FleetSettings.objects.filter(needs_key=True).exists()

    visitor.post("/client-keys/admission/")
    assert FleetSettings.objects.get().needs_key
    assert "accept requests from every client" in visitor.get("/client-keys/admission/").text
    visitor.post("/client-keys/admission/")
    assert not FleetSettings.objects.get().needs_key


def test_limits_are_set_and_reset(visitor, pool):
    page = visitor.get("/fleet/limits/").text
    assert "413" in page
    wrong = visitor.post("/fleet/limits/", {"limits-retries": "9"})
    assert (wrong.status_code, 'id="id_limits-retries_error"' in wrong.text) == (422, True)
    visitor.post("/fleet/limits/", {"limits-retries": "0", "limits-max_connections_per_address": "8"})
    limits = FleetSettings.objects.get().limits
    assert (limits["retries"], limits["max_connections_per_address"], limits["max_in_flight"]) == (0, 8, 8192)
    visitor.post("/fleet/limits/", {"limits-unset": "on"})
    assert FleetSettings.objects.get().limits is None


def test_the_retry_policy_is_set_one_failure_a_line_and_kept(visitor, pool):
    page = "/fleet/limits/"
    wrong = visitor.post(page, {"limits-retry_on": "connect\ntimeouts"})
    assert wrong.status_code == 422
    assert "Line 2: Expected a text of the form" in wrong.text
    assert "connect|reset|timeout|" in wrong.text
    visitor.post(page, {"limits-retry_on": "connect\ntimeout\n", "limits-response_timeout_s": "60"})
    limits = FleetSettings.objects.get().limits
    assert (limits["retry_on"], limits["response_timeout_s"]) == (["connect", "timeout"], 60.0)
    assert ">\nconnect\ntimeout</textarea>" in visitor.get(page).text


def test_users_see_the_keys_of_their_projects_and_only_admins_create_keys(client, django_user_model, key):
    create_client_key(create_project("other"), "confidential")
    user = django_user_model.objects.create_user("eve", password="a long enough password")
    client.force_login(user)
    for role, can_make in ((Role.EDITOR, False), (Role.ADMIN, True)):
        set_role(user, role, key.project)
        page = client.get("/client-keys/").text
        assert "default.agents" in page
        assert "confidential" not in page
        assert ("New key" in page) == can_make
        assert ("Require a key" in page) is False  # that is for admins of everything
    form = {"project": key.project_id, "name": "more"}
    assert client.post("/client-keys/", form).status_code == 200
    assert ClientKey.objects.filter(name="more").exists()


def test_the_number_of_queries_does_not_depend_on_the_length(visitor, pool, django_assert_num_queries):
    for number in range(9):
        create_client_key(pool.project, f"key-{number}")
    visitor.get("/client-keys/")
    with django_assert_num_queries(7):
        visitor.get("/client-keys/")
