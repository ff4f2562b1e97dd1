"""How far each router has come to the newest configuration, in words for a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controlplane.models import ConfigSnapshot, Router
from controlplane.push.client import signing_key_id
from controlplane.services.snapshots import newest_snapshot


@dataclass(frozen=True, slots=True)
class SignatureLine:
    """What is known of the signature of what a router runs."""

    word: str  # "verified", "expired", "unsigned", "unchecked", "other key", "refused" or "unknown"
    reason: str  # what to do about it; "" where it is as it should be


@dataclass(frozen=True, slots=True)
class RouterLine:
    """One router against what it should run."""

    router: Router
    name: str
    status: str  # "in sync", "pending", "refused", "unreachable" or "lost"
    reason: str  # why it is not in sync; "" when it is
    running: int | None
    behind: int | None  # snapshots between what it runs and the newest; None while it runs nothing known
    last_seen: datetime
    signature: SignatureLine

    @property
    def still_safe(self) -> str:
        """What goes on working although it does not run what it should; "" where it does."""
        if self.status == "in sync":
            return ""
        if self.running is None:
            return "It has no configuration yet and says so on /readyz, so a balancer sends it nothing."
        serves = f"It serves on with configuration {self.running}"
        match self.status:
            case "refused":
                return f"{serves}, which it checked when it took it; it is asked again every 20 s."
            case "unreachable":
                return f"{serves}, as far as it told; it is tried again within 20 s."
            case "pending":
                return f"{serves} until it answers."
        return "If it runs, it serves on with what it has on disk, and is told as soon as it is back."


@dataclass(frozen=True, slots=True)
class Convergence:
    """The newest configuration, and every router's line."""

    newest: ConfigSnapshot | None
    lines: list[RouterLine]

    @property
    def acknowledged(self) -> int:
        """How many routers run the newest configuration."""
        return sum(line.status == "in sync" for line in self.lines)

    @property
    def ratio(self) -> float:
        """Their share, 0 to 1; 0 without routers."""
        return self.acknowledged / len(self.lines) if self.lines else 0.0

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way any more: each router runs it, or is lost."""
        return all(line.status in {"in sync", "lost"} for line in self.lines)


def convergence() -> Convergence:
    """The state of every router; two queries."""
    newest = newest_snapshot()
    return Convergence(newest, lines_of(Router.objects.all(), newest))


def lines_of(routers: Iterable[Router], newest: ConfigSnapshot | None) -> list[RouterLine]:
    """Each router's line against the newest configuration."""
    return [_line(router, newest) for router in routers]


def _line(router: Router, newest: ConfigSnapshot | None) -> RouterLine:
    status, reason = _status(router, newest)
    behind = newest.number - router.running_number if newest and router.running_number else None
    return RouterLine(
        router, router.name, status, reason, router.running_number, behind, router.last_seen_at, _signature(router)
    )


SIGNATURES = {  # by what routers say
    "": ("unknown", "It does not say whether it checks signatures: it is older than they are, or runs nothing yet."),
    "unchecked": (
        "unchecked",
        "It takes configurations from whoever has the router token. Give it WARMPATH_ROUTER_CONFIG_KEYS, which "
        "manage.py config_key prints.",
    ),
    "unsigned": ("unsigned", "It runs a file of its own, which nobody signed."),
    "expired": ("expired", "The signature was not renewed in time. It serves on, and is sent a new one."),
}


def _signature(router: Router) -> SignatureLine:
    nack: dict[str, Any] = router.last_nack or {}
    if str(nack.get("path", "")).startswith("$.signature"):
        return SignatureLine("refused", f"It refuses ours: {nack.get('reason', 'no reason given')}.")
    state = router.signature_state
    if state == "verified" and router.signature_key != signing_key_id():
        return SignatureLine("other key", f"It was signed with {router.signature_key}, and is sent anew with ours.")
    return SignatureLine(*SIGNATURES.get(state, (state, "")))


def _status(router: Router, newest: ConfigSnapshot | None) -> tuple[str, str]:
    """In sync wins; then why not, the most telling cause first."""
    if newest and router.runs(newest.number, newest.sha256):
        return (
            ("lost", "Silent; it ran this configuration when it was last heard of.")
            if router.lost_at
            else ("in sync", "")
        )
    if router.lost_at:
        return "lost", router.last_error or "Silent: neither does it announce itself, nor did it answer."
    nack: dict[str, Any] = router.last_nack or {}
    if newest and nack.get("revision") == newest.number:
        return "refused", f"{nack.get('reason', 'no reason given')} (at {nack.get('path', 'an unnamed place')})"
    return ("unreachable", router.last_error) if router.last_error else ("pending", "")
