"""Setting up, using, resetting and requiring a second factor."""

import base64
import hashlib
import hmac
import re
import struct
import time
import zlib

import pytest
from allauth.mfa.models import Authenticator
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command
from django.test import Client
from rest_framework.test import APIClient

from controlplane.models import AuditEntry, Role, Scope
from controlplane.services.access.tokens import create_token
from controlplane.services.access.users import add_user, set_role

PASSWORD = "a long enough passphrase"
pytestmark = pytest.mark.django_db


def code_of(secret, steps=0):
    """The code of RFC 6238."""
    counter = struct.pack(">Q", int(time.time()) // 30 + steps)
    digest = hmac.new(base64.b32decode(secret), counter, hashlib.sha1).digest()
    offset = digest[-1] & 15
    return f"{(struct.unpack('>I', digest[offset : offset + 4])[0] & 0x7FFFFFFF) % 1_000_000:06}"


@pytest.fixture
def ada():
    user = add_user("ada", password=PASSWORD)
    set_role(user, Role.VIEWER, None)
    return user


@pytest.fixture
def signed_in(ada, client):
    client.force_login(ada)
    return client


def set_up(client):
    """Set up a second factor on the pages; (secret, recovery codes)."""
    page = client.get("/accounts/second-factor/set-up/").text
    secret = re.search(r'id="key" value="([A-Z2-7]{32})"', page)[1]
    done = client.post("/accounts/second-factor/set-up/", {"code": code_of(secret)}, follow=True)
    return secret, re.findall(r"<code>(\d{8})</code>", done.text)


def password_step(ada):
    client = Client()
    response = client.post("/accounts/login/?next=/events/", {"login": "ada", "password": PASSWORD})
    return client, response


def test_with_a_second_factor_a_password_does_not_suffice(signed_in, ada):
    secret, codes = set_up(signed_in)
    assert len(set(codes)) == 10
    client, response = password_step(ada)
    assert response["Location"].startswith("/accounts/login/code/")
    assert client.get("/").status_code == 302, "not signed in yet"
    wrong = client.post("/accounts/login/code/", {"code": "000000"})
    assert "Incorrect code" in wrong.text
    right = client.post("/accounts/login/code/", {"code": code_of(secret)})
    assert right["Location"] == "/events/"
    assert client.get("/").status_code == 200


def test_the_qr_code_names_user_and_product(signed_in):
    page = signed_in.get("/accounts/second-factor/set-up/")
    assert 'src="data:image/svg+xml;base64,' in page.text
    assert "img-src 'self' data:" in page["Content-Security-Policy"]
    assert page.context["totp_url"].startswith("otpauth://totp/ada?")
    assert "issuer=Warmpath" in page.context["totp_url"]


def test_a_code_works_once(signed_in, ada):
    secret, _ = set_up(signed_in)
    code = code_of(secret)
    for expected in (302, 200):
        client, _ = password_step(ada)
        assert client.post("/accounts/login/code/", {"code": code}).status_code == expected


def test_a_recovery_code_works_once_and_codes_are_shown_once(signed_in, ada):
    _, codes = set_up(signed_in)
    again = signed_in.get("/accounts/second-factor/recovery-codes/").text
    assert not [code for code in codes if code in again]
    for expected in (302, 200):
        client, _ = password_step(ada)
        assert client.post("/accounts/login/code/", {"code": codes[0]}).status_code == expected
    assert "9 unused recovery codes" in signed_in.get("/accounts/second-factor/").text
    page = signed_in.post("/accounts/second-factor/recovery-codes/new/", follow=True).text
    assert not set(re.findall(r"<code>(\d{8})</code>", page)) & set(codes)


def test_guesses_at_codes_are_limited(signed_in, ada, settings):
    secret, _ = set_up(signed_in)
    client, _ = password_step(ada)
    for number in range(settings.SIGN_IN_FAILURES):
        client.post("/accounts/login/code/", {"code": f"{number:06}"})
    assert "Signing in failed too often" in client.post("/accounts/login/code/", {"code": code_of(secret)}).text
    assert AuditEntry.objects.filter(summary="Sign-in as ada failed: a wrong code.").count() == 5
    call_command("unlock_sign_in", "ada")
    assert client.post("/accounts/login/code/", {"code": code_of(secret)}).status_code == 302


def stored_sessions():
    """The stored sessions, decoded as far as possible without a key."""
    packed = [row.partition(":")[0] for row in Session.objects.values_list("session_data", flat=True)]
    plain = [base64.urlsafe_b64decode(text.lstrip(".") + "==") for text in packed]
    return b"".join(zlib.decompress(data) if text[0] == "." else data for text, data in zip(packed, plain, strict=True))


def test_totp_secrets_are_encrypted_in_database_and_session(signed_in, ada):
    page = signed_in.get("/accounts/second-factor/set-up/").text
    pending = re.search(r'id="key" value="([A-Z2-7]{32})"', page)[1]
    assert signed_in.session["mfa.totp.secret"] == pending, "it is kept for the next step"
    assert stored_sessions()
    assert pending.encode() not in stored_sessions()
    secret, codes = set_up(signed_in)
    stored = str(list(Authenticator.objects.values_list("data", flat=True))) + stored_sessions().decode("latin-1")
    assert not [text for text in (secret, *codes) if text in stored]


def test_an_admin_resets_a_second_factor(signed_in, ada, client, here, user_with):
    set_up(signed_in)
    admin = Client()
    admin.force_login(user_with("admin", everywhere=True))
    assert "Reset second factor" in admin.get(f"/users/{ada.pk}/").text
    admin.post(f"/users/{ada.pk}/second-factor/")
    _, response = password_step(ada)
    assert response["Location"] == "/events/"
    assert AuditEntry.objects.get(summary="The second factor of ada was reset.").actor == "admin-true"
    assert "has no second factor" in admin.post(f"/users/{ada.pk}/second-factor/", follow=True).text


def test_a_command_resets_a_second_factor(signed_in, ada):
    set_up(signed_in)
    call_command("reset_second_factor", "ada")
    assert not Authenticator.objects.exists()
    with pytest.raises(CommandError, match="no second factor"):
        call_command("reset_second_factor", "ada")


def test_changes_of_a_second_factor_are_audited(signed_in, ada, django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True):
        set_up(signed_in)
        signed_in.post("/accounts/second-factor/remove/")
    summaries = (
        AuditEntry.objects.filter(kind="second_factor_changed").order_by("number").values_list("summary", flat=True)
    )
    assert {"ada set up a second factor.", "ada set up recovery codes.", "ada removed a second factor."} <= set(
        summaries
    )
    assert not Authenticator.objects.exists(), "the recovery codes were removed too"


def test_a_role_that_needs_a_second_factor_is_denied_without_one(client, here, user_with, settings):
    settings.REQUIRE_TOTP_FOR = frozenset({"admin"})
    admin, viewer = user_with("admin"), user_with("viewer")
    client.force_login(viewer)
    assert client.get("/").status_code == 200
    client.force_login(admin)
    response = client.get("/fleet/", follow=True)
    assert response.redirect_chain == [("/accounts/second-factor/set-up/", 302)]
    assert "Your role needs a second factor" in response.text
    assert client.get("/api/v1/pools").status_code == 403
    set_up(client)
    assert client.get("/fleet/").status_code == 200
    assert client.get("/api/v1/pools").status_code == 200


def test_tokens_need_no_second_factor(here, user_with, settings):
    settings.REQUIRE_TOTP_FOR = frozenset({"admin"})
    _, text = create_token(user_with("admin"), name="deploy", scopes=[Scope.READ])
    script = APIClient()
    script.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    assert script.get("/api/v1/pools").status_code == 200
