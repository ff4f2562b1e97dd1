"""E-mail through a real SMTP server: delivery, and each error of the server."""

import ipaddress
import select
import socket
import ssl
import threading

import pytest

from controlplane.egress import Rules
from telemetry.channels import email as channel_module
from telemetry.channels.base import ConfigError, DeliveryError
from telemetry.channels.email import EMAIL, mail_of, send_mail
from tests.fakes.certificates import Authority
from tests.fakes.fake_metrics_server import refusing
from tests.fakes.mail_server import mail_server
from tests.telemetry.channels.messages import HOSTILE, NOTICE, ROLLOUT, TEST, message, several

pytestmark = [  # what aiosmtpd has to say of itself, where TLS is from the first byte
    pytest.mark.filterwarnings("ignore:Session.login_data is deprecated"),
    pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS"),
]
LOOPBACK = Rules((ipaddress.ip_network("127.0.0.0/8"),), allow_public=False)
LOGIN = ("warm", "s3cret-password")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("mail"))


@pytest.fixture(scope="module")
def certificate(authority):
    return authority.issue("mail")


@pytest.fixture(scope="module")
def trusting(authority):
    return authority.client()


def config(port, **changes):
    plain = {"host": "127.0.0.1", "port": port, "security": "none"}
    return EMAIL.complete({"recipients": "a@example.org, b@example.org", "sender": "w@example.org", **plain, **changes})


def send(port, told=TEST, *, tls=None, rules=LOOPBACK, **changes):
    tls = tls or ssl.create_default_context()
    return send_mail(config(port, **changes), told, site="https://warmpath.example", rules=rules, tls=tls)


def refused(port, **options):
    with pytest.raises(DeliveryError) as caught:
        send(port, **options)
    return caught.value


def test_a_mail_has_the_facts_of_an_alert_as_text_and_html():
    with mail_server() as server:
        assert send(server.port, message()).status == 250

    (mail,) = server.mails
    assert server.envelopes == [("w@example.org", ["a@example.org", "b@example.org"])]
    assert mail["Subject"].startswith("[FIRING] Hit rate of pool chat is 20.1 %")
    assert mail["Message-ID"] == "<msg_1@example.org>"
    assert mail["References"] == "<warmpath-alert-7@example.org>"
    text = mail.get_body(("plain",)).get_content()
    html = mail.get_body(("html",)).get_content()
    for words in (
        "Value: 20.1 %",
        "Baseline: 79.0 %",
        "Replicas: r1 (10.0 %)",
        "Revision 7 moved homes. (confidence 90 %) Revert",
    ):
        assert words in text
    assert "Reachable" not in text  # it is not known
    assert "Open alert: https://warmpath.example/alerts/7/" in text
    assert '<a href="https://warmpath.example/alerts/7/">Open alert</a>' in html


def test_message_ids_are_stable_and_mails_of_an_alert_form_a_thread():
    with mail_server() as server:
        for state in ("firing", "firing", "resolved"):
            send(server.port, message(state=state))

    first, again, end = server.mails
    assert first["Message-ID"] == again["Message-ID"]
    assert end["Subject"].startswith("[RESOLVED]")
    assert len({mail["References"] for mail in server.mails}) == 1


def test_several_alerts_are_one_mail_and_a_notice_also_goes_to_the_owner():
    data = {**NOTICE.payload["data"], "also_to": ["owner@example.org", "a@example.org"]}
    with mail_server() as server:
        send(server.port, several(1, 2))
        send(server.port, type(NOTICE)(NOTICE.id, NOTICE.at, {**NOTICE.payload, "data": data}))

    text = server.mails[0].get_body(("plain",)).get_content()
    assert "* Alert 1." in text
    assert "* Alert 2." in text
    assert "2 alerts firing in pool chat" in text
    assert server.envelopes[1][1] == ["a@example.org", "b@example.org", "owner@example.org"]


def test_untrusted_text_is_escaped():
    """Labels and summaries that people and clients chose."""
    with mail_server() as server:
        for hostile in HOSTILE:
            send(server.port, message(summary=hostile, pool=hostile))

    assert len(server.mails) == len(HOSTILE)
    assert {tuple(to) for _, to in server.envelopes} == {("a@example.org", "b@example.org")}
    for mail in server.mails:
        html = mail.get_body(("html",)).get_content()
        assert mail["Bcc"] is None
        assert "<script" not in html
        assert "<img" not in html
        assert "14" not in mail["Subject"]


@pytest.mark.parametrize("security", ["starttls", "tls"])
def test_the_password_is_sent_only_over_tls(security, certificate, trusting):
    with mail_server(**{security: certificate.server()}, login=LOGIN) as server:
        send(server.port, security=security, username=LOGIN[0], password=LOGIN[1], tls=trusting)
        wrong = refused(server.port, security=security, username=LOGIN[0], password="wrong", tls=trusting)

    assert server.encrypted == [True]
    assert (str(wrong), wrong.status, wrong.retryable) == ("it rejected the user or the password", 535, False)


@pytest.mark.parametrize("security", ["starttls", "tls"])
def test_an_untrusted_certificate_is_rejected(security, certificate):
    with mail_server(**{security: certificate.server()}) as server:
        error = refused(server.port, security=security)

    assert "certificate" in str(error)
    assert server.mails == []


def test_a_server_that_greets_late_is_waited_for():
    """Nothing is sent before the greeting, on no connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = []

        def greet_late():
            first = listener.accept()[0]
            heard.append(select.select([first, listener], [], [], 1.5)[0])
            first.sendall(b"220 late\r\n")
            heard.append(first.recv(100))
            first.close()

        thread = threading.Thread(target=greet_late, daemon=True)
        thread.start()
        error = refused(listener.getsockname()[1])
        thread.join(timeout=5)

    assert heard == [[], b"ehlo warmpath\r\n"]
    assert str(error) == "the server closed the connection"


def test_nothing_is_sent_without_starttls(trusting):
    with mail_server() as server:
        error = refused(server.port, security="starttls", tls=trusting)

    assert not error.retryable
    assert server.mails == []


@pytest.mark.parametrize(("reply", "retryable"), [("451 try later", True), ("552 too much", False), ("421 bye", True)])
def test_retryable_responses(reply, retryable):
    with mail_server() as server:
        server.replies = [reply]
        error = refused(server.port)

    assert (error.retryable, error.status, error.response) == (retryable, int(reply[:3]), reply[4:])


def test_rejected_recipients_are_reported():
    with mail_server() as server:
        server.refused = {"b@example.org"}
        assert send(server.port).response == "rejected for 1 of 2 recipients"
        server.refused.add("a@example.org")
        error = refused(server.port)

    assert (str(error), error.retryable) == ("it rejected every recipient", False)


def test_a_refused_connection_is_retryable():
    with refusing() as port:
        assert refused(port).retryable


def talker(*chunks):
    """A server that says these chunks, one each 20 ms and the last for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def run():
        connection, _ = listener.accept()
        with connection:
            for chunk in chunks:
                connection.sendall(chunk)
            while not done.wait(0.02):
                try:
                    connection.sendall(chunks[-1])
                except OSError:
                    return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return listener, done, thread


@pytest.mark.parametrize("chunk", [b"2", b"220-" + b"x" * 900 + b"\r\n"], ids=["a trickle", "an endless greeting"])
@pytest.mark.parametrize("security", ["none", "tls"])
def test_a_slow_server_is_disconnected_at_the_deadline(monkeypatch, chunk, security):
    monkeypatch.setattr(channel_module, "DEADLINE_S", 0.5)
    listener, done, thread = talker(chunk)
    with listener:
        error = refused(listener.getsockname()[1], security=security)
        done.set()
        thread.join(timeout=5)

    assert error.retryable


def test_no_error_names_the_server_or_the_password(certificate, trusting):
    with mail_server(tls=certificate.server(), login=LOGIN) as server, refusing() as port:
        asked = {"security": "tls", "username": "u", "password": "s3cret-wrong", "tls": trusting}
        errors = [refused(server.port, **asked), refused(port)]

    for error in errors:
        assert "s3cret" not in f"{error} {error!r} {error.__cause__!r} {error.response}"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"recipients": ""}, "recipients"),
        ({"recipients": "nobody"}, "recipients"),
        ({"recipients": "a@b.c\nBcc: d@e.f"}, "recipients"),
        ({"recipients": ["a@b.c"] * 51}, "recipients"),
        ({"sender": "Warm <w@example.org>"}, "sender"),
        ({"host": "smtp.example.org:25"}, "host"),
        ({"host": "smtp.example.org\r\nX"}, "host"),
        ({"port": 0}, "port"),
        ({"port": "many"}, "port"),
        ({"security": "maybe"}, "security"),
        ({"port": 465, "security": "starttls"}, "security"),
        ({"username": "u"}, "password"),
        ({"username": "u", "password": "p"}, "security"),
    ],
)
def test_invalid_mail_configs_are_rejected_by_field(given, field):
    with pytest.raises(ConfigError) as caught:
        config(**{"port": 25, **given})
    assert caught.value.field == field


def test_a_public_config_has_no_password():
    shown = EMAIL.public(config(587, security="tls", username="u", password="s3cret-password"))

    assert shown["target"] == "a@example.org, b@example.org by 127.0.0.1:587"
    assert "s3cret" not in str(shown)
    assert shown["secrets"] == ["password"]


def test_a_step_of_a_rollout_is_a_mail_with_its_reason_and_link():
    mail = mail_of(ROLLOUT, sender="w@x.org", recipients=["a@x.org"], site="https://w.example")
    assert mail["Subject"].startswith("[ROLLOUT] Revision 5 of chat was rolled back automatically")
    for part in ("plain", "html"):
        text = mail.get_body((part,)).get_content()
        assert "Hit rate 41.0 % (60.0 % before)" in text
        assert "https://w.example/rollouts/3/" in text
    assert "Policy: chat\nRevision: 5\n" in mail.get_body(("plain",)).get_content()
