"""A fleet whose hit rate falls and recovers on request, and a notification receiver.

Only one rule is enabled, on hit-rate drops. Earlier notifications are not counted.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.end_to_end.live_stack import ROOT
from tests.fakes.fake_webhook_receiver import FakeWebhookReceiver, receiving
from tests.reliability.stand import Stand, soon

QUICK_RULE = {
    "bin_s": 5,
    "baseline_s": 300,
    "days": 0,
    "min_requests": 1,
    "min_tokens": 1,
    "for_s": 0,
    "keep_firing_s": 0,
}
RECEIVED_S = 60  # within which a receiver is notified of a transition
FIRING, RESOLVED = "firing", "resolved"
SERVE = "from tests.reliability.history import serve; serve()"


class AlertingFleet:
    """The fleet; ``expected`` lists the transitions that should have been notified by now."""

    def __init__(self, stand: Stand, receiver: FakeWebhookReceiver, history: subprocess.Popen[str]) -> None:
        self.expected: list[str] = []
        self._stand = stand
        self._receiver = receiver
        self._history = history
        self._rows_before = len(self._rows())
        self._notifications_before = self._notifications()

    @property
    def received(self) -> list[str]:
        """Transitions that the receiver got, in order."""
        return [message.payload["type"].removeprefix("alert.") for message in self._receiver.received]

    @property
    def transitions(self) -> list[str]:
        """Stored transitions."""
        return [kind.removeprefix("alert_") for kind in self._rows()[self._rows_before :]]

    @property
    def notifications(self) -> int:
        """Stored notifications."""
        return self._notifications() - self._notifications_before

    def change_hit_rate(self) -> None:
        """Lower the hit rate, or restore it to 0.8."""
        is_drop = self.expected[-1:] != [FIRING]
        self.set_hit_rate(0.1 if is_drop else 0.8)
        self.expected.append(FIRING if is_drop else RESOLVED)

    def set_hit_rate(self, ratio: float) -> None:
        """Set the hit rate from now on."""
        assert self._history.stdin
        assert self._history.stdout
        self._history.stdin.write(f"{ratio}\n")
        self._history.stdin.flush()
        assert self._history.stdout.readline() == "written\n"

    def until_received(self, within_s: float = RECEIVED_S) -> None:
        """Wait until the receiver got each expected transition once and in order."""
        try:
            soon(lambda: self.received == self.expected, within_s, f"{self.expected}, each once")
        except BaseException:
            details = f"received: {self.received}", f"stored: {self.transitions}", f"verdict: {self.verdict()}"
            print(*details, *self._stand.worker.lines[-60:], sep="\n")  # noqa: T201 - pytest shows it with the failure
            raise

    def until_delivered(self) -> None:
        """Wait until the last notification is marked as delivered."""
        undelivered = "select count(*) from telemetry_notification where state != 'delivered'"
        soon(lambda: self._stand.query(undelivered) == 0, RECEIVED_S, "the last notification to be marked as delivered")

    def verdict(self) -> str | None:
        """Result of the rule's last evaluation."""
        statement = """
            select verdict ->> 'result' from telemetry_alertrule rule join controlplane_pool pool on pool.id = pool_id
            where kind = 'hit_rate_drop' and pool.name = 'default'
        """
        return self._stand.query(statement)

    def _notifications(self) -> int:
        return int(self._stand.query("select count(*) from telemetry_notification"))

    def _rows(self) -> list[str]:
        """Rows of the rule's alerts; other rules had some before they were disabled."""
        statement = """
            select coalesce(array_agg(event.kind order by event.id), '{}') from controlplane_event event
            join telemetry_alert alert on alert.id = (event.detail ->> 'alert')::bigint
            join telemetry_alertrule rule on rule.id = alert.rule_id
            where event.kind like 'alert%' and rule.kind = 'hit_rate_drop'
        """
        return list(self._stand.query(statement))


@contextmanager
def alerting_fleet(stand: Stand, rest: httpx.Client) -> Iterator[AlertingFleet]:
    """Watch a stand for the length of a block; its fleet starts healthy."""
    with receiving() as receiver, _history(stand) as history:
        fleet = AlertingFleet(stand, receiver, history)
        fleet.set_hit_rate(0.8)
        _enable_only_hit_rate_rule(rest)  # after the readings, because the evaluator reads a rule's history only once
        soon(lambda: fleet.verdict() == "ok", RECEIVED_S, "the rule to evaluate its history")
        created = rest.post("channels", json={"name": "ops", "config": {"url": receiver.url}})
        assert created.status_code == 201, created.text
        try:
            yield fleet
            if fleet.expected[-1:] == [FIRING]:
                fleet.change_hit_rate()
                fleet.until_received()
        finally:  # otherwise every module after a failed one would fail too
            deleted = rest.delete(f"channels/{created.json()['id']}", headers={"If-Match": "*"})
        assert deleted.status_code == 204


def _enable_only_hit_rate_rule(rest: httpx.Client) -> None:
    """Disable every rule but the pool ``default``'s hit-rate drop rule, and shorten its times."""
    for rule in rest.get("alert-rules", params={"limit": 1000}).json()["results"]:
        is_hit_rate_rule = (rule["pool"], rule["kind"]) == ("default", "hit_rate_drop")
        change = {"settings": QUICK_RULE} if is_hit_rate_rule else {"enabled": False}
        edit = rest.patch(f"alert-rules/{rule['id']}", json=change, headers={"If-Match": "*"})
        assert edit.status_code == 200, edit.text


@contextmanager
def _history(stand: Stand) -> Iterator[subprocess.Popen[str]]:
    """The process that writes readings."""
    command = [sys.executable, "manage.py", "shell", "--verbosity=0", "-c", SERVE]
    process = subprocess.Popen(
        command, cwd=ROOT, env=stand.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
