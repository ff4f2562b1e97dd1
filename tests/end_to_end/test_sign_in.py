"""Signing in with a second factor and with single sign-on."""

import base64
import hashlib
import hmac
import struct
import time

import pytest
from playwright.sync_api import expect

from controlplane.settings import sign_in
from tests.end_to_end.conftest import with_every_browser_build
from tests.end_to_end.looking import SIZES, look
from tests.fakes.identity_provider import PASSWORD, running_provider

OURS = "a long enough password"


@pytest.fixture
def provider(live_server, tmp_path, settings, monkeypatch):
    """An identity provider process whose group ``platform`` has the role admin."""
    with running_provider(tmp_path / "oidc", f"{live_server.url}/accounts/oidc/127.0.0.1-PORT/callback/") as running:
        for name, value in running.settings().items():
            monkeypatch.setenv(name, value)
        settings.OIDC_ISSUER = running.issuer
        settings.SOCIALACCOUNT_PROVIDERS = sign_in.providers(running.issuer)
        settings.OIDC_GROUP_ROLES = sign_in.group_roles(["platform=admin"])
        yield running


def code_of(secret):
    digest = hmac.new(base64.b32decode(secret), struct.pack(">Q", int(time.time()) // 30), hashlib.sha1).digest()
    offset = digest[-1] & 15
    return f"{(struct.unpack('>I', digest[offset : offset + 4])[0] & 0x7FFFFFFF) % 1_000_000:06}"


@with_every_browser_build
def test_a_user_signs_in_at_the_identity_provider(site, provider, complaints):
    provider.set_groups("ada", "platform")
    page = site.new_context(base_url=site.url).new_page()
    page.goto("/fleet/")
    complaints.listen(page)
    page.get_by_role("button", name="Sign in with Example ID").click()
    page.get_by_label("Username").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign In").click()
    page.wait_for_url("**/fleet/")
    page.locator(".account > summary").click()
    expect(page.get_by_text("Signed in as ada", exact=True)).to_be_visible()
    page.get_by_role("link", name="Settings").click()
    page.get_by_role("link", name="Users").click()
    expect(page.get_by_text("admin of all projects, by group")).to_be_visible()


def test_a_user_sets_up_a_second_factor_and_signs_in_with_it(site, complaints):
    page = site.open()
    complaints.listen(page)
    page.goto("/accounts/second-factor/")
    page.get_by_role("link", name="Set up").click()
    drawn = page.get_by_role("img", name="QR code").evaluate("img => img.complete && img.naturalWidth > 0")
    assert drawn, "the policy lets the picture be shown"
    secret = page.get_by_label("Key for manual entry").input_value()
    page.get_by_label("Code", exact=True).fill(code_of(secret))
    page.get_by_role("button", name="Set up").click()
    expect(page.get_by_text("they are not shown again")).to_be_visible()
    recovery = page.locator(".codes code").first.inner_text()

    other = site.new_context(base_url=site.url).new_page()
    complaints.listen(other)
    other.goto("/accounts/login/?next=/users/new/")
    other.get_by_label("Username").fill("olga")
    other.get_by_label("Password").fill(OURS)
    other.get_by_role("button", name="Sign in", exact=True).click()
    other.get_by_label("Code from your app").fill(recovery)
    other.get_by_role("button", name="Sign in").click()
    other.wait_for_url("**/users/new/")


def test_the_pages_on_the_way(site, operator, provider, complaints):
    page = site.open(viewport=SIZES[360])
    complaints.listen(page)
    wrong = {}

    def seen(where):
        if found := look(page):
            wrong[where] = found

    page.goto("/accounts/second-factor/set-up/")
    page.get_by_label("Code", exact=True).fill("000000")
    page.get_by_role("button", name="Set up").click()
    expect(page.locator("[aria-invalid=true]")).to_be_visible()
    seen("a wrong code")
    secret = page.get_by_label("Key for manual entry").input_value()
    page.get_by_label("Code", exact=True).fill(code_of(secret))
    page.get_by_role("button", name="Set up").click()
    page.get_by_text("they are not shown again").wait_for()
    seen("recovery codes")
    for path in ("", "recovery-codes/", "recovery-codes/new/", "remove/"):
        page.goto(f"/accounts/second-factor/{path}")
        seen(f"second factor {path}")
    for path in ("/accounts/confirm/code/", f"/accounts/oidc/{provider.name}/", "/accounts/single-sign-on/cancelled/"):
        page.goto(path)
        seen(path)
    page.goto(f"/users/{operator.pk}/")
    seen("a user with a second factor")
    stranger = site.new_context(viewport=SIZES[360], base_url=site.url).new_page()
    stranger.goto("/accounts/login/")
    page, entering = stranger, page
    seen("sign-in with a provider")
    page.get_by_label("Username").fill("olga")
    page.get_by_label("Password").fill(OURS)
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.get_by_label("Code from your app").wait_for()
    seen("code")
    entering.close()
    complaints.heard[:] = [text for text in complaints.heard if "403 (Forbidden)" not in text]  # what cancelled answers

    assert wrong == {}
