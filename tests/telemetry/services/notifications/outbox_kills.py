"""Processes that deliver are killed with kill -9, again and again; what does the receiver count?

A program, because it forks: ``python outbox_kills.py HOST DATABASE URL CYCLES SEED``, with a migrated database and a
webhook receiver. Each cycle writes one message, lets a process deliver it that is killed at a moment that chance picks
around the send, and lets another come after the lease has ended. Prints how often each moment was picked, as JSON.
"""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial

MOMENTS = ("before the send", "while it is sent", "after the send", "after it is marked")
MOST_S = 20  # that one process may take


def die() -> None:
    """At once, as nobody can catch it."""
    os.kill(os.getpid(), signal.SIGKILL)


def delivering(now: datetime, moment: str | None, after_s: float) -> None:
    """In a process of its own: deliver what is due, and be killed at a moment; None for one that lives."""
    from telemetry.services.notifications import outbox
    from telemetry.services.notifications.channels import send

    def send_and_die(channel, message):
        if moment == "before the send":
            die()
        if moment == "while it is sent":
            threading.Timer(after_s, die).start()
        receipt = send(channel, message)
        if moment in {"after the send", "while it is sent"}:
            die()
        return receipt

    outbox.deliver_due(lambda: now, send_and_die)
    if moment is not None:
        die()


def forked(work: Callable[[], None]) -> bool:
    """Run something in a child; whether it was killed rather than ended."""
    from django.db import connection

    connection.close()
    if (child := os.fork()) == 0:
        signal.alarm(MOST_S)
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        raise AssertionError(f"a process ended by signal {os.WTERMSIG(status)}")
    return os.WIFSIGNALED(status)


def main(host: str, name: str, url: str, cycles: int, seed: int) -> dict[str, int]:
    """All cycles; how often each moment was picked."""
    from django.conf import settings

    settings.DATABASES["default"].update(HOST=host, NAME=name)
    import django

    django.setup()
    from django.utils import timezone

    from telemetry.services.notifications.channels import create_channel, test_send
    from telemetry.services.notifications.outbox import LEASE_S

    chance, picked = random.Random(seed), collections.Counter[str]()
    channel = create_channel(f"kills-{seed}", config={"url": url})
    now = timezone.now()
    for _ in range(cycles):
        test_send(channel)
        moment = chance.choice(MOMENTS)
        picked[moment] += 1
        now = max(now, timezone.now()) + timedelta(seconds=1)
        if not forked(partial(delivering, now, moment, chance.random() * 0.005)):
            raise AssertionError(f"nobody was killed {moment}")
        now += timedelta(seconds=LEASE_S + 1)
        if forked(partial(delivering, now, None, 0)):
            raise AssertionError("the one who was to live was killed")
    return dict(picked)


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings.test"
    sys.stdout.write(json.dumps(main(*sys.argv[1:4], *map(int, sys.argv[4:6]))))
