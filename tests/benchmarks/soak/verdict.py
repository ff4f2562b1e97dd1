"""Prints a row's figures with their conditions."""

from __future__ import annotations

DRIFT = 1.05  # allowed growth factor after the warm-up
SLACK_KIB = 2048  # growth that is always allowed: one more malloc arena
SLACK = 16  # sockets or tasks of health checks and idle connections


class Verdict:
    """One row's results; printed one by one, so that an interrupted run shows its results."""

    def __init__(self, goal: str) -> None:
        self.goal = goal
        self.failures: list[str] = []

    def report(self, name: str, figures: str) -> None:
        print(f"{self.goal:<8} {name:<22} {figures}", flush=True)

    def check(self, name: str, figures: str, passed: bool) -> None:
        """Print a figure and record whether its condition holds."""
        self.report(name, f"{figures}{'' if passed else '   WRONG'}")
        if not passed:
            self.failures.append(f"{self.goal}: {name}: {figures}")

    def check_growth(self, name: str, before: float, after: float, *, slack: float, unit: str = "") -> None:
        """Check that a figure grew by no more than ``DRIFT`` or ``slack``."""
        text = (
            f"{before:,.0f}{unit} after the warm-up, {after:,.0f}{unit} at the end: {100 * (after / before - 1):+.1f} %"
        )
        self.check(name, text, after <= max(before * DRIFT, before + slack))

    def check_memory(self, before_kib: float, after_kib: float) -> None:
        self.check_growth("resident", before_kib, after_kib, slack=SLACK_KIB, unit=" KiB")
