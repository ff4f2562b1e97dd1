"""The process that delivers a notification is killed around the send; another takes over when its lease ends.

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
        counts = killed_deliveries(host, "warmpath", cycles=cycles, seed=seed, timeout_s=60 + 2.0 * cycles)
    verdict.report("kills", ", ".join(f"{count} {moment}" for moment, count in sorted(counts.moments.items())))
    verdict.check("lost", f"{counts.lost} of {cycles}", counts.lost == 0)
    verdict.check("sent twice", f"{counts.sent_again}, more than twice {counts.too_often}", counts.too_often == 0)
