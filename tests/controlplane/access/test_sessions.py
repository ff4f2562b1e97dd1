"""Listing and ending sessions."""

import pytest
from django.contrib.sessions.models import Session
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.models import AuditEntry, UserSession
from controlplane.services.access.users import delete_ended_sessions, sessions_of, set_active, set_password
from controlplane.tasks import clean_up

PASSWORD = "a long enough password"
NOON = "2026-11-21T12:00Z"
pytestmark = pytest.mark.django_db


def sign_in(user, agent="", address="10.1.2.3", password=PASSWORD):
    """A browser that signed in through the form."""
    browser = Client(headers={"User-Agent": agent}, REMOTE_ADDR=address)
    response = browser.post("/accounts/login/", {"login": user.username, "password": password})
    assert response.status_code == 302
    return browser


def is_signed_in(browser):
    return browser.get("/fleet/").status_code == 200


def session_entries():
    return list(AuditEntry.objects.filter(kind="user_changed").order_by("number").values_list("actor", "summary"))


def test_users_see_only_their_own_sessions(here, user_with):
    olga, other = user_with("editor"), user_with("viewer")
    laptop, _, other_browser = (
        sign_in(olga, "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"),
        sign_in(olga, "<b>curl</b>", "203.0.113.9"),
        sign_in(other, "Lynx"),
    )

    page = laptop.get("/sessions/").text

    assert page.count("this session") == 1
    assert "Firefox on Linux" in page
    assert "203.0.113.9" in page
    assert "&lt;b&gt;curl&lt;/b&gt;" in page, "the user agent is untrusted text"
    assert "Lynx" not in page
    for session in UserSession.objects.all():
        assert session.key not in page, "the key grants access"
    other_session = UserSession.objects.get(user=olga, agent__contains="Firefox")
    assert other_browser.post(f"/sessions/{other_session.pk}/end/").status_code == 404
    assert is_signed_in(laptop)


def test_sessions_can_be_ended_and_that_is_audited(here, user_with):
    olga = user_with("editor")
    laptop, phone, desk, kiosk = (sign_in(olga, name) for name in ("laptop", "phone", "desk", "kiosk"))

    response = laptop.post(f"/sessions/{UserSession.objects.get(agent='phone').pk}/end/", follow=True)
    assert "The session has ended." in response.text
    assert [is_signed_in(browser) for browser in (laptop, phone, desk, kiosk)] == [True, False, True, True]
    response = laptop.post("/sessions/end-others/", follow=True)
    assert "2 other sessions ended. This session continues." in response.text
    assert [is_signed_in(browser) for browser in (laptop, desk, kiosk)] == [True, False, False]
    own = sessions_of(olga).get()
    assert laptop.post(f"/sessions/{own.pk}/end/")["Location"] == "/accounts/login/"
    assert not is_signed_in(laptop)

    name = olga.username
    assert session_entries() == [
        (name, f"{name} ended one of their sessions."),
        (name, f"2 other sessions of {name} ended."),
        (name, f"{name} ended one of their sessions."),
    ]
    entry = AuditEntry.objects.filter(kind="user_changed").first()
    assert entry.before[0]["address"] == "10.1.2.3"
    assert own.key not in str(list(AuditEntry.objects.values()))


def test_an_admin_ends_all_sessions_of_a_user(here, user_with):
    olga, admin = user_with("editor"), user_with("admin", everywhere=True)
    laptop, phone, desk = sign_in(olga, "laptop"), sign_in(olga, "phone"), sign_in(admin)
    page = desk.get(f"/users/{olga.pk}/").text
    assert "2 active sessions" in page
    assert "2 sessions of" in desk.post(f"/users/{olga.pk}/sessions/end/", follow=True).text
    assert [is_signed_in(browser) for browser in (laptop, phone, desk)] == [False, False, True]
    assert session_entries() == [(admin.username, f"2 sessions of {olga.username} ended.")]


def test_ending_a_session_needs_reauthentication(here, user_with, time_machine):
    time_machine.move_to(NOON, tick=False)
    olga = user_with("editor")
    laptop, phone = sign_in(olga), sign_in(olga, "phone")
    time_machine.move_to("2026-11-21T12:16Z", tick=False)
    assert laptop.post("/sessions/end-others/")["Location"].startswith("/accounts/confirm/")
    assert is_signed_in(phone)


def test_a_changed_password_ends_all_other_sessions(here, user_with):
    olga, new_password = user_with("editor"), "another long passphrase"
    laptop, phone = sign_in(olga, "laptop"), sign_in(olga, "phone")
    laptop.post(
        "/accounts/password/change/", {"oldpassword": PASSWORD, "password1": new_password, "password2": new_password}
    )
    assert [is_signed_in(laptop), is_signed_in(phone)] == [True, False]
    assert [session.agent for session in sessions_of(olga)] == ["laptop"], (
        "the key changed, and the session is listed once"
    )
    assert Session.objects.count() == 1

    set_password(olga, PASSWORD)
    assert Session.objects.count() == 0


def test_sessions_of_a_disabled_user_end(here, user_with):
    olga, _ = user_with("editor"), user_with("admin", everywhere=True)
    laptop = sign_in(olga)
    olga = set_active(olga, active=False)
    set_active(olga, active=True)
    assert not is_signed_in(laptop)


def test_a_session_ends_seven_days_after_sign_in(here, user_with, time_machine):
    time_machine.move_to(NOON, tick=False)
    laptop = sign_in(user_with("editor"))
    time_machine.move_to("2026-11-21T23:00Z", tick=False)
    assert is_signed_in(laptop)
    for day in (22, 23, 24, 25, 26, 27):
        for hour in ("00", "11", "22"):
            time_machine.move_to(f"2026-11-{day}T{hour}:00Z", tick=False)
            assert is_signed_in(laptop), (day, hour)
    time_machine.move_to("2026-11-28T08:00Z", tick=False)
    assert is_signed_in(laptop)
    time_machine.move_to("2026-11-28T12:00Z", tick=False)
    laptop.get("/fleet/")
    assert not is_signed_in(laptop)


def test_ended_sessions_are_deleted(here, user_with, time_machine):
    time_machine.move_to(NOON, tick=False)
    olga = user_with("editor")
    sign_in(olga, "left alone")
    used = sign_in(olga, "in use")
    sign_in(olga, "signed out").post("/accounts/logout/")
    time_machine.move_to("2026-11-21T23:00Z", tick=False)
    assert is_signed_in(used)
    time_machine.move_to("2026-11-22T01:00Z", tick=False)
    assert [session.agent for session in sessions_of(olga)] == ["in use"]
    clean_up()
    assert Session.objects.count() == 1
    time_machine.move_to("2026-11-22T12:30Z", tick=False)
    delete_ended_sessions()
    assert [session.agent for session in UserSession.objects.all()] == ["in use"]


def test_the_list_of_sessions_takes_a_fixed_number_of_queries(here, user_with):
    olga = user_with("editor")
    laptop = sign_in(olga)

    def count_queries():
        with CaptureQueriesContext(connection) as queries:
            assert laptop.get("/sessions/").status_code == 200
        return len(queries)

    assert is_signed_in(laptop)  # consumes the message after sign-in
    queries_of_one, later = count_queries(), timezone.now() + timezone.timedelta(hours=1)
    for number in range(120):
        Session.objects.create(session_key=f"s{number}", session_data="", expire_date=later)
        UserSession.objects.create(user=olga, key=f"s{number}", address="10.0.0.1")
    assert count_queries() == queries_of_one
    assert laptop.get("/sessions/").text.count("<code>10.") == 100
