"""What the receiver counts after deliveries were killed, for the test and for the soak."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.fake_webhook_receiver import receiving

ROOT = Path(__file__).resolve().parents[4]


@dataclass(frozen=True)
class Counted:
    """Over all messages."""

    messages: int
    lost: int
    sent_again: int  # once each
    too_often: int
    moments: dict[str, int]


def killed_deliveries(host: str, database: str, *, cycles: int, seed: int, timeout_s: float) -> Counted:
    """Run the cycles in a process of their own, and count."""
    with receiving() as receiver:
        script = str(Path(__file__).with_name("outbox_kills.py"))
        command = [sys.executable, script, host, database, receiver.url, str(cycles), str(seed)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise AssertionError(done.stderr[-4000:])
        counts = collections.Counter(got.id for got in receiver.received)
    several = collections.Counter(counts.values())
    too_often = sum(many for times, many in several.items() if times > 2)
    moments = json.loads(done.stdout.splitlines()[-1])
    return Counted(len(counts), cycles - len(counts), several[2], too_often, moments)
