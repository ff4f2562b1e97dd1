"""R16: the process that delivers a message is killed around the send; another comes when its lease has ended.

A real PostgreSQL, a webhook receiver on loopback, and a process of its own for each delivery, killed with kill -9 at a
moment that chance picks. Nothing may be lost, and nothing come more than twice; it comes under the same id.
"""

from __future__ import annotations

from tests.benchmarks.soak.verdict import Verdict


def measure(verdict: Verdict, cycles: int, seed: int) -> None:
    """So many."""
    from tests.benchmarks.telemetry.stand import standing
    from tests.telemetry.services.notifications.kills import killed_deliveries

    with standing() as stand:
        host = str(stand.folder / "pg")
        counted = killed_deliveries(host, "warmpath", cycles=cycles, seed=seed, timeout_s=60 + 2.0 * cycles)
    verdict.say("kills", ", ".join(f"{many} {moment}" for moment, many in sorted(counted.moments.items())))
    verdict.holds("lost", f"{counted.lost} of {cycles}", counted.lost == 0)
    verdict.holds("sent twice", f"{counted.sent_again}, more often {counted.too_often}", counted.too_often == 0)
