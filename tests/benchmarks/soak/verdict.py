"""Prints a row's figures with their conditions."""

from __future__ import annotations

DRIFT = 1.05  # of memory after the warm-up (R10, R21)
SLACK_KIB = 2048  # that a process may grow by whatever its size: an arena more
SLACK = 16  # sockets or tasks that come and go by themselves: health checks, kept-alive connections


class Verdict:
    """One row's results; printed as they come, so that an interrupted run shows what it found."""

    def __init__(self, goal: str) -> None:
        self.goal = goal
        self.wrong: list[str] = []

    def say(self, what: str, figures: str) -> None:
        print(f"{self.goal:<8} {what:<22} {figures}", flush=True)

    def holds(self, what: str, figures: str, well: bool) -> None:
        """Print a figure and record whether its condition holds."""
        self.say(what, f"{figures}{'' if well else '   WRONG'}")
        if not well:
            self.wrong.append(f"{self.goal}: {what}: {figures}")

    def flat(self, what: str, before: float, after: float, *, slack: float, unit: str = "") -> None:
        """Whether a figure grew by no more than ``DRIFT`` and ``slack``."""
        text = (
            f"{before:,.0f}{unit} after the warm-up, {after:,.0f}{unit} at the end: {100 * (after / before - 1):+.1f} %"
        )
        self.holds(what, text, after <= max(before * DRIFT, before + slack))

    def memory(self, before_kib: float, after_kib: float) -> None:
        self.flat("resident", before_kib, after_kib, slack=SLACK_KIB, unit=" KiB")
