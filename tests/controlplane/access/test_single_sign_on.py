"""Single sign-on, against an OpenID provider in a process of its own."""

import re
from html import unescape
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from allauth.socialaccount.models import SocialAccount
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.test import Client

from controlplane.models import AuditEntry, Role, RoleAssignment
from controlplane.services.access.users import add_user, set_active, set_role
from controlplane.settings import sign_in
from tests.fakes.identity_provider import running_provider

PASSWORD = "a long enough passphrase"
pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("oidc") / "provider"
    with running_provider(folder, "http://testserver/accounts/oidc/127.0.0.1-PORT/callback/") as provider:
        yield provider


@pytest.fixture
def provider(running, settings, monkeypatch):
    """A configured provider; ada and bob are in no group."""
    for name, value in running.settings().items():
        monkeypatch.setenv(name, value)
    settings.OIDC_ISSUER = sign_in.validate_issuer(running.issuer)
    settings.SOCIALACCOUNT_PROVIDERS = sign_in.providers(settings.OIDC_ISSUER)
    settings.OIDC_GROUP_ROLES = sign_in.group_roles(["platform=admin", "fleet ops=operator@here", "readers=viewer"])
    for user in ("ada", "bob", "admin"):
        running.set_groups(user)
    yield running
    running.override_claims()
    running.override_claims(userinfo=True)


def start_sign_in(client, provider, **query):
    """Start a sign-in; the URL at the provider that the browser is redirected to."""
    page = client.post(f"/accounts/oidc/{provider.name}/", query_params=query or None)
    return unescape(re.search(r'content="0;url=([^"]+)"', page.text)[1])


def complete_sign_in(client, provider, user, *, follow=False, **query):
    """Complete a sign-in at the provider; our last response."""
    callback = provider.sign_in(start_sign_in(client, provider, **query), user)
    return client.get(callback.removeprefix("http://testserver"), follow=follow)


def roles(user):
    assignments = RoleAssignment.objects.filter(user__username=user).order_by("pk").values_list("project__name", "role")
    return set(assignments)


def test_a_new_user_gets_the_roles_of_their_groups(client, here, provider):
    provider.set_groups("ada", "fleet ops", "readers", "chess club")
    response = complete_sign_in(client, provider, "ada", next="/fleet/")
    assert (response.status_code, response["Location"]) == (302, "/fleet/")
    assert client.get("/fleet/").status_code == 200
    assert roles("ada") == {("here", "operator"), (None, "viewer")}
    ada = User.objects.get(username="ada")
    assert not ada.has_usable_password()
    summaries = AuditEntry.objects.order_by("number").values_list("summary", flat=True)
    assert "ada is operator of project here, by group." in summaries
    assert "ada signed in." in summaries


def test_group_roles_are_synchronized_at_sign_in_and_assigned_roles_stay(client, here, provider):
    provider.set_groups("ada", "platform")
    complete_sign_in(client, provider, "ada")
    ada = User.objects.get(username="ada")
    set_role(ada, Role.EDITOR, here.project)
    assert roles("ada") == {(None, "admin"), ("here", "editor")}
    provider.set_groups("ada", "fleet ops")
    complete_sign_in(client, provider, "ada")
    assert roles("ada") == {("here", "editor"), ("here", "operator")}
    provider.set_groups("ada")
    complete_sign_in(client, provider, "ada")
    assert roles("ada") == {("here", "editor")}
    assert AuditEntry.objects.filter(summary="ada no longer has a role in all projects, by group.").exists()


def test_the_higher_of_two_roles_counts(client, here, provider):
    provider.set_groups("ada", "fleet ops")
    complete_sign_in(client, provider, "ada")
    set_role(User.objects.get(username="ada"), Role.VIEWER, here.project)
    assert client.get(f"/fleet/replicas/{here.replica.pk}/state/draining/").status_code == 200


def test_a_new_user_without_a_mapped_group_is_rejected(client, here, provider):
    provider.set_groups("bob", "chess club")
    response = complete_sign_in(client, provider, "bob")
    assert response.status_code == 403
    assert "None of your groups has a role here" in response.text
    assert not User.objects.filter(username="bob").exists()
    assert AuditEntry.objects.filter(summary="Sign-in as an unknown user failed by single sign-on.").exists()


def test_accounts_are_not_matched_by_name_or_email(client, here, provider):
    local_user = add_user("admin", password=PASSWORD, email="admin@example.com")
    set_role(local_user, Role.ADMIN, None)
    provider.set_groups("admin", "readers")
    complete_sign_in(client, provider, "admin")
    provider_user = SocialAccount.objects.get().user
    assert provider_user != local_user
    assert provider_user.username != "admin"
    assert client.get("/users/").status_code == 403


def test_a_disabled_user_is_rejected(client, here, provider):
    provider.set_groups("ada", "platform")
    complete_sign_in(client, provider, "ada")
    ada = User.objects.get(username="ada")
    User.objects.create_superuser("root", password=PASSWORD)
    set_active(ada, False)
    response = complete_sign_in(Client(), provider, "ada")
    assert response["Location"] == "/accounts/inactive/"
    assert client.get("/fleet/").status_code == 302, "the earlier session has ended"


def test_a_connected_account_is_identified_by_its_subject(client, here, provider):
    local_user = add_user("grace", password=PASSWORD)
    set_role(local_user, Role.VIEWER, None)
    client.force_login(local_user)
    assert "Connect your account to" in client.get("/accounts/second-factor/").text
    complete_sign_in(client, provider, "ada", process="connect")
    assert SocialAccount.objects.get().user == local_user
    stranger = Client()
    provider.set_groups("ada", "fleet ops")
    complete_sign_in(stranger, provider, "ada")
    assert stranger.get("/fleet/").context["request"].user == local_user
    assert roles("grace") == {(None, "viewer"), ("here", "operator")}
    stranger.post("/accounts/single-sign-on/disconnect/")
    assert not SocialAccount.objects.exists()
    assert roles("grace") == {(None, "viewer")}


def test_an_account_connected_to_another_user_is_not_taken_over(client, here, provider):
    provider.set_groups("ada", "readers")
    complete_sign_in(Client(), provider, "ada")
    client.force_login(add_user("mallory", password=PASSWORD))
    complete_sign_in(client, provider, "ada", process="connect", follow=True)
    assert SocialAccount.objects.get().user.username == "ada"


def test_a_user_without_a_password_cannot_disconnect(client, here, provider):
    provider.set_groups("ada", "readers")
    complete_sign_in(client, provider, "ada")
    response = client.post("/accounts/single-sign-on/disconnect/", follow=True)
    assert "You have no password in Warmpath" in response.text
    assert SocialAccount.objects.exists()


def test_a_single_sign_on_user_cannot_set_a_password(client, here, provider, settings):
    provider.set_groups("ada", "platform")
    complete_sign_in(client, provider, "ada")
    assert "Change password" not in client.get("/fleet/").text
    response = client.get("/accounts/password/change/", follow=True)
    assert response.status_code == 200
    assert "Your account has no password" in response.text
    settings.SOCIALACCOUNT_PROVIDERS = {}
    session = client.session
    session["authenticated_at"] = 0
    session.save()
    assert client.get("/users/new/").status_code == 403, "no redirect loop without the provider"


def test_an_authorization_code_needs_the_pkce_verifier(client, here, provider):
    provider.set_groups("ada", "readers")
    url = start_sign_in(client, provider)
    query = parse_qs(urlsplit(url).query)
    assert query["code_challenge_method"] == ["S256"]
    assert query["max_age"] == ["43200"]
    code = parse_qs(urlsplit(provider.sign_in(url, "ada")).query)["code"][0]
    stolen = {"grant_type": "authorization_code", "code": code, "redirect_uri": query["redirect_uri"][0]}
    stolen |= {"client_id": "warmpath", "client_secret": "the-clients-own-secret"}
    response = httpx.post(f"{provider.issuer}/identity/o/api/token", data=stolen, trust_env=False)
    assert response.status_code >= 400


def test_an_unsolicited_callback_is_rejected(client, here, provider):
    provider.set_groups("ada", "readers")
    callback = provider.sign_in(start_sign_in(Client(), provider), "ada").removeprefix("http://testserver")
    response = client.get(callback)  # in another browser
    assert response.status_code == 403
    assert not User.objects.filter(username="ada").exists()


@pytest.mark.parametrize(
    ("lie", "document"),
    [
        ({"iss": "http://127.0.0.1:1"}, "id token"),
        ({"aud": "another client"}, "id token"),
        ({"exp": 1}, "id token"),
        ({"sub": "999"}, "id token"),
        ({"sub": "999"}, "userinfo"),
    ],
)
def test_inconsistent_claims_are_rejected(client, here, provider, lie, document):
    provider.set_groups("ada", "platform")
    provider.override_claims(userinfo=document == "userinfo", **lie)
    response = complete_sign_in(client, provider, "ada")
    assert response.status_code in {403, 502}
    assert "_auth_user_id" not in client.session
    assert not User.objects.filter(username="ada").exists()


def test_an_unreachable_provider_is_explained(client, here, provider, settings):
    settings.OIDC_NETWORKS = []
    response = client.post(f"/accounts/oidc/{provider.name}/")
    assert response.status_code == 502
    assert "cannot be reached" in response.text
    page = client.get("/accounts/login/")
    assert "Sign in with Example ID" in page.text
    assert page.status_code == 200


@pytest.mark.parametrize("host", ["169.254.169.254", "[::ffff:169.254.169.254]", "0xa9fea9fe", "2852039166", "0"])
def test_an_internal_issuer_is_not_contacted(client, provider, settings, host, caplog):
    (app,) = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"]
    app["settings"] = app["settings"] | {"server_url": f"http://{host}"}
    response = client.post(f"/accounts/oidc/{provider.name}/")
    assert response.status_code == 502
    assert "not an allowed destination" in caplog.text, "denied, not merely unreachable"


def test_the_authentication_time_is_the_providers(client, here, provider, settings):
    settings.REQUIRE_TOTP_FOR = frozenset({"admin"})
    provider.set_groups("ada", "platform")
    complete_sign_in(client, provider, "ada")
    assert client.get("/users/new/").status_code == 200, "the provider just authenticated the user"
    provider.override_claims(auth_time=1_700_000_000)
    complete_sign_in(client, provider, "ada")
    redirect = client.get("/users/new/")
    assert redirect["Location"].startswith(f"/accounts/oidc/{provider.name}/?")
    assert parse_qs(urlsplit(redirect["Location"]).query)["auth_params"] == ["prompt=login&max_age=0"]
    provider.override_claims()
    url = start_sign_in(client, provider, auth_params="prompt=login&max_age=0", next="/users/new/")
    assert parse_qs(urlsplit(url).query)["prompt"] == ["login"]
    callback = provider.sign_in(url, "ada").removeprefix("http://testserver")
    assert client.get(callback)["Location"] == "/users/new/"
    assert client.get("/users/new/").status_code == 200


def test_passwords_work_beside_single_sign_on(client, provider):
    User.objects.create_superuser("root", password=PASSWORD)
    assert client.post("/accounts/login/", {"login": "root", "password": PASSWORD}).status_code == 302


def test_without_a_provider_single_sign_on_is_off(client, here):
    assert not django_settings.SOCIALACCOUNT_PROVIDERS
    assert "Sign in with" not in client.get("/accounts/login/").text.replace("Sign in with a", "")
    assert client.get("/accounts/oidc/anything/").status_code == 404


@pytest.mark.parametrize(
    "url", ["http://id.example.com", "ftp://id.example.com", "id.example.com", "https://", "http://10.0.0.1"]
)
def test_an_issuer_without_tls_stops_the_start(url):
    with pytest.raises(ImproperlyConfigured, match="WARMPATH_OIDC_ISSUER"):
        sign_in.validate_issuer(url)


@pytest.mark.parametrize("mapping", ["platform", "=admin", "platform=king", "platform="])
def test_an_invalid_group_mapping_stops_the_start(mapping):
    with pytest.raises(ImproperlyConfigured, match="WARMPATH_OIDC_GROUP_ROLES"):
        sign_in.group_roles([mapping])


def test_a_group_may_have_any_name():
    (group_role,) = sign_in.group_roles(["cn=ops,dc=x".replace(",", ";") + "=operator@default"])
    assert (group_role.group, group_role.role, group_role.project) == ("cn=ops;dc=x", "operator", "default")


def test_accounts_of_another_issuer_are_other_accounts():
    monkey = pytest.MonkeyPatch()
    monkey.setenv("WARMPATH_OIDC_CLIENT_ID", "x")
    names = [sign_in.providers(issuer)["openid_connect"]["APPS"][0]["provider_id"] for issuer in ISSUERS]
    monkey.undo()
    assert len(set(names)) == len(ISSUERS)


ISSUERS = ["https://a.example", "https://b.example", "https://a.example/realms/x", "https://a.example:8443"]
