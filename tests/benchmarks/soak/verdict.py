"""What a row says: figures, each with what it must be, and whether it is."""

from __future__ import annotations

DRIFT = 1.05  # of memory after the warm-up (R10, R21)
SLACK_KIB = 2048  # that a process may grow by whatever its size: an arena more
SLACK = 16  # sockets or tasks that come and go by themselves: health checks, kept-alive connections


class Verdict:
    """One row's. Prints as it goes, so that an hour's run says what it found though it was ended."""

    def __init__(self, goal: str) -> None:
        self.goal = goal
        self.wrong: list[str] = []

    def say(self, what: str, figures: str) -> None:
        """Print what nobody judges."""
        print(f"{self.goal:<8} {what:<22} {figures}", flush=True)

    def holds(self, what: str, figures: str, well: bool) -> None:
        """Print a figure, and note whether it is as it must be."""
        self.say(what, f"{figures}{'' if well else '   WRONG'}")
        if not well:
            self.wrong.append(f"{self.goal}: {what}: {figures}")

    def flat(self, what: str, before: float, after: float, *, slack: float, unit: str = "") -> None:
        """Whether a figure has not grown: by ``DRIFT`` and ``slack`` at most."""
        text = (
            f"{before:,.0f}{unit} after the warm-up, {after:,.0f}{unit} at the end: {100 * (after / before - 1):+.1f} %"
        )
        self.holds(what, text, after <= max(before * DRIFT, before + slack))

    def memory(self, before_kib: float, after_kib: float) -> None:
        """Resident memory."""
        self.flat("resident", before_kib, after_kib, slack=SLACK_KIB, unit=" KiB")
