"""R16: the process that delivers a notification is killed around the send; another takes over when its lease ends.

A real PostgreSQL, a webhook receiver on loopback, and one process per delivery, killed with SIGKILL at a random
moment. Nothing may be lost, nothing may arrive more than twice, and repeats have the same id.
"""

from __future__ import annotations

from tests.benchmarks.soak.verdict import Verdict


def measure(verdict: Verdict, cycles: int, seed: int) -> None:
    from tests.benchmarks.telemetry.stand import standing
    from tests.telemetry.services.notifications.kills import killed_deliveries

    with standing() as stand:
        host = str(stand.folder / "pg")
        counted = killed_deliveries(host, "warmpath", cycles=cycles, seed=seed, timeout_s=60 + 2.0 * cycles)
    verdict.say("kills", ", ".join(f"{many} {moment}" for moment, many in sorted(counted.moments.items())))
    verdict.holds("lost", f"{counted.lost} of {cycles}", counted.lost == 0)
    verdict.holds("sent twice", f"{counted.sent_again}, more often {counted.too_often}", counted.too_often == 0)
