"""Limits on guessing passwords, by name and by address, without revealing users."""

import threading

import pytest
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client

from controlplane.models import AuditEntry, Event, Role, SignInLock
from controlplane.services.access import sign_ins
from controlplane.services.access.users import add_user, set_role

PASSWORD = "a long enough passphrase"
LOCKED = "Signing in failed too often"
pytestmark = pytest.mark.django_db


@pytest.fixture
def ada():
    return add_user("ada", password=PASSWORD)


def sign_in(name, password, address="192.0.2.1", client=None):
    return (client or Client()).post(
        "/accounts/login/", {"login": name, "password": password}, REMOTE_ADDR=address, HTTP_X_REQUEST_ID="same"
    )


def fail(times, name="ada", address="192.0.2.1"):
    return [sign_in(name, f"wrong {number}", address) for number in range(times)][-1]


def test_five_failures_lock_the_sign_in(ada, settings):
    fail(settings.SIGN_IN_FAILURES)
    response = sign_in("ada", PASSWORD)
    assert response.status_code == 200
    assert LOCKED in response.text
    assert sign_in("ada", PASSWORD, "192.0.2.2").status_code == 302, "the user can sign in from another address"


def test_spellings_of_a_name_share_a_count(ada, settings):
    fail(settings.SIGN_IN_FAILURES - 1)
    assert LOCKED not in sign_in("ADA ", "wrong").text
    assert LOCKED in sign_in("ada", PASSWORD).text


def test_a_lock_ends_by_itself(ada, settings, time_machine):
    time_machine.move_to("2026-11-21T10:00Z", tick=True)
    fail(settings.SIGN_IN_FAILURES + 1)
    time_machine.move_to("2026-11-21T10:15:30Z", tick=True)
    assert sign_in("ada", PASSWORD).status_code == 302


def test_a_success_does_not_reset_the_count(ada, settings):
    fail(settings.SIGN_IN_FAILURES - 1)
    assert sign_in("ada", PASSWORD).status_code == 302
    fail(1)
    assert LOCKED in sign_in("ada", PASSWORD).text


def test_an_address_is_limited_over_all_names(ada, settings):
    settings.ACCOUNT_RATE_LIMITS = {"login_failed": "6/900s/ip,5/900s/key"}
    for number in range(6):
        sign_in(f"nobody-{number}", "wrong")
    assert LOCKED in sign_in("ada", PASSWORD).text
    assert sign_in("ada", PASSWORD, "192.0.2.2").status_code == 302


def test_responses_do_not_reveal_whether_a_user_exists(ada, settings):
    known, unknown = fail(1, "ada"), fail(1, "nobody")
    assert without_token(known).replace("ada", "nobody") == without_token(unknown)
    known, unknown = fail(settings.SIGN_IN_FAILURES, "ada"), fail(settings.SIGN_IN_FAILURES, "nobody")
    assert LOCKED in known.text
    assert without_token(known).replace("ada", "nobody") == without_token(unknown)


def without_token(response):
    assert response.status_code == 200
    return response.text.replace(str(response.context["csrf_token"]), "")


def test_an_unknown_name_costs_as_many_hashes_as_a_wrong_password(ada, settings, monkeypatch):
    """So that the time of a response does not reveal whether a user exists."""
    hashed: list[int] = []
    encode = PBKDF2PasswordHasher.encode

    def counted(self, password, salt, iterations=None):
        hashed.append(iterations or self.iterations)
        return encode(self, password, salt, iterations)

    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.PBKDF2PasswordHasher"]
    add_user("bob", password=PASSWORD)  # hashed as in production
    monkeypatch.setattr(PBKDF2PasswordHasher, "encode", counted)

    work = {}
    for name in ("bob", "nobody"):
        hashed.clear()
        sign_in(name, "wrong")
        work[name] = hashed.copy()
    assert work["nobody"] == work["bob"] == [PBKDF2PasswordHasher.iterations]


def test_a_lockout_is_audited_once_and_lifted_by_an_admin(ada, client, settings):
    fail(settings.SIGN_IN_FAILURES + 3)
    assert AuditEntry.objects.filter(kind="sign_in_locked").count() == 1
    assert Event.objects.filter(kind="sign_in_locked").count() == 1
    admin = add_user("admin", password=PASSWORD)
    set_role(admin, Role.ADMIN, None)
    client.force_login(admin)
    page = client.get(f"/users/{ada.pk}/")
    assert "Locked from 192.0.2.1" in page.text
    client.post(f"/users/{ada.pk}/unlock/")
    assert sign_in("ada", PASSWORD).status_code == 302
    assert AuditEntry.objects.get(kind="sign_in_unlocked").actor == "admin"
    assert "Locked from" not in client.get(f"/users/{ada.pk}/").text
    assert LOCKED in fail(settings.SIGN_IN_FAILURES + 1).text
    assert AuditEntry.objects.filter(kind="sign_in_locked").count() == 2


def test_a_command_lifts_a_lock(ada, settings, capsys):
    fail(settings.SIGN_IN_FAILURES + 1)
    call_command("unlock_sign_in", "ada")
    assert "locks lifted: 1" in capsys.readouterr().out
    assert sign_in("ada", PASSWORD).status_code == 302
    with pytest.raises(CommandError, match="no user 'eve'"):
        call_command("unlock_sign_in", "eve")


def test_attacks_do_not_fill_the_audit_log(ada, monkeypatch):
    monkeypatch.setattr(sign_ins, "MAX_FAILURES_PER_HOUR", 5)
    for number in range(9):
        sign_in("hunter2hunter2", "x", f"192.0.2.{number}")
    failures = AuditEntry.objects.filter(kind="sign_in_refused")
    assert failures.count() == 5
    assert not failures.filter(summary__contains="hunter2").exists()


def test_unknown_names_get_no_lock_entry(settings):
    fail(settings.SIGN_IN_FAILURES + 2, "hunter2hunter2")
    assert not SignInLock.objects.exists()
    assert AuditEntry.objects.filter(summary__endswith="too many failures.").count() == 1
    assert not AuditEntry.objects.filter(summary__contains="hunter2").exists()


@pytest.mark.django_db(transaction=True)
def test_concurrent_failures_are_all_counted(settings):
    add_user("ada", password=PASSWORD)
    responses, barrier = [], threading.Barrier(8)

    def attack(number):
        barrier.wait(10)
        responses.append(sign_in("ada", f"wrong {number}", "192.0.2.77"))
        connections.close_all()

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    checked = [response for response in responses if LOCKED not in response.text]
    assert len(responses) == 8
    assert len(checked) <= settings.SIGN_IN_FAILURES


def test_a_distributed_attack_locks_unknown_devices_only(ada, settings):
    settings.ACCOUNT_RATE_LIMITS = settings.ACCOUNT_RATE_LIMITS | {"login_failed_name": "6/900s/key"}
    own = Client()
    assert sign_in("ada", PASSWORD, "198.51.100.1", own).status_code == 302
    own.post("/accounts/logout/")
    for number in range(6):
        assert LOCKED not in fail(1, "ada", f"203.0.113.{number}").text
    assert LOCKED in sign_in("ada", PASSWORD, "203.0.113.99").text
    assert LOCKED in sign_in("ADA", PASSWORD, "203.0.113.98").text
    assert AuditEntry.objects.filter(kind="sign_in_locked").count() == 1, "one entry for all addresses"
    assert sign_in("ada", PASSWORD, "198.51.100.77", own).status_code == 302, "a known device, at any address"
    own.post("/accounts/logout/")
    sign_ins.unlock_sign_in(ada)
    assert sign_in("ada", PASSWORD, "203.0.113.99").status_code == 302


def test_known_devices_are_limited_and_forgotten_with_the_password(ada, settings):
    settings.ACCOUNT_RATE_LIMITS = settings.ACCOUNT_RATE_LIMITS | {"login_failed_name": "1/900s/key"}
    own = Client()
    assert sign_in("ada", PASSWORD, "198.51.100.1", own).status_code == 302
    own.post("/accounts/logout/")
    fail(1, "ada", "203.0.113.1")
    for number in range(settings.SIGN_IN_FAILURES):
        assert LOCKED not in sign_in("ada", f"wrong {number}", "198.51.100.2", own).text
    assert LOCKED in sign_in("ada", PASSWORD, "198.51.100.2", own).text
    ada.set_password(PASSWORD + " anew")
    ada.save()
    assert LOCKED in sign_in("ada", PASSWORD + " anew", "198.51.100.3", own).text


def test_addresses_of_one_ipv6_network_are_one(ada, settings):
    for number in range(settings.SIGN_IN_FAILURES):
        fail(1, "ada", f"2001:db8::{number:x}")
    assert LOCKED in sign_in("ada", PASSWORD, "2001:db8::ffff").text
    assert sign_in("ada", PASSWORD, "2001:db8:0:1::1").status_code == 302
