"""Rules on the control plane itself: configuration rollout, telemetry lag, and pools without data."""

from __future__ import annotations

from typing import Annotated, Literal

from telemetry.alerts.findings import POOL, Evidence, Finding, Findings, Reason, Result, Timing, above_limit, no_data
from telemetry.alerts.history_window import HistoryView, Source
from telemetry.alerts.kinds.base import (
    CurrentSettings,
    ForS,
    KeepFiringS,
    Kind,
    RuleSettings,
    Scope,
    WindowS,
    WindowSettings,
    duration,
    setting,
)
from telemetry.models import STARTING_S, RuleKind


class RolloutStuckSettings(CurrentSettings, frozen=True):
    """Settings of ``rollout_stuck``."""

    after_s: Annotated[
        float, setting("seconds", "How long a router may be behind the newest configuration.", ge=10, le=86_400)
    ] = 120.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 0.0

    @property
    def timing(self) -> Timing:
        return Timing(self.for_s, self.keep_firing_s, self.after_s)


class RolloutEvidence(Evidence, frozen=True):
    routers: list[str]  # that are behind
    present: int
    refusing: dict[str, str]  # router -> why


def _evaluate_rollout(settings: RolloutStuckSettings, view: HistoryView, _: str) -> Findings:
    """Compare how long routers have been behind with the limit."""
    control = view.history.control
    if control is None:
        return {POOL: no_data(Reason.NOT_STORED)}
    if not control.routers:
        return {POOL: no_data(Reason.NO_REPLICAS)}
    behind = sorted(control.behind_s, key=lambda name: -control.behind_s[name])
    evidence = RolloutEvidence(behind[:20], control.routers, dict(control.rejections))
    longest_s = control.behind_s[behind[0]] if behind else 0.0
    return {POOL: above_limit(longest_s, settings.after_s, "seconds", evidence)}


def _summarize_rollout(_: Scope, __: RolloutStuckSettings, finding: Finding[RolloutEvidence]) -> str:
    count = f"{len(finding.evidence.routers)} of {finding.evidence.present} routers"
    rejections = finding.evidence.refusing.items()
    reason = next((f"; {router} rejects it: {reason}" for router, reason in rejections), "")
    return f"{count} have not applied the newest configuration for {duration(finding.value)}{reason}"[:299] + "."


ROLLOUT_STUCK = Kind(
    name="rollout_stuck",
    inhibited_by=(),
    is_fleet_wide=True,
    about="Fires when a router that is present has not applied the newest configuration for a while: it rejects it or "
    "cannot be reached. All routers serve all pools, so one pool's rule is enough. It evaluates the current state, of "
    "which no history is stored: there is no preview.",
    settings=RolloutStuckSettings,
    sources=frozenset({Source.CONTROL}),
    evaluate=_evaluate_rollout,
    summarize=_summarize_rollout,
    condition=lambda settings: f"a router without the newest configuration for {duration(settings.after_s)}",
    figure="Time behind",
)


class RouterLostSettings(CurrentSettings, frozen=True):
    """Settings of ``router_lost``."""

    max_present: (
        Annotated[
            float,
            setting("routers", "Fires only while at most so many routers are present; null: always.", ge=0, le=1000),
        ]
        | None
    ) = None
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 0.0


class LostEvidence(Evidence, frozen=True):
    lost: list[str]
    silent_s: float


def _evaluate_routers(settings: RouterLostSettings, view: HistoryView, _: str) -> Findings:
    """Compare the routers that are present with those that should be."""
    control = view.history.control
    if control is None:
        return {POOL: no_data(Reason.NOT_STORED)}
    if not control.routers and not control.lost:
        return {POOL: no_data(Reason.NO_REPLICAS)}
    is_relevant = settings.max_present is None or control.routers <= settings.max_present
    result, reason = (Result.BREACH, Reason.BELOW) if control.lost and is_relevant else (Result.OK, Reason.WITHIN)
    evidence = LostEvidence(list(control.lost[:20]), control.silent_s)
    expected = control.routers + len(control.lost)
    return {POOL: Finding(result, reason, float(control.routers), float(expected), unit="count", evidence=evidence)}


def _summarize_routers(_: Scope, settings: RouterLostSettings, finding: Finding[LostEvidence]) -> str:
    lost, since = finding.evidence.lost, duration(round(finding.evidence.silent_s))
    if not finding.value and settings.max_present is not None:  # a rule without it names the routers that are lost
        named = f" of {lost[0]}" if len(lost) == 1 else ""
        return f"No router is left: no heartbeat{named} for {since}. Clients of all pools get no responses through it."
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    names = f"Router {lost[0]} is" if len(lost) == 1 else f"Routers {', '.join(lost[:3])}{more} are"
    left = f"{finding.value:.0f} of {finding.limit:.0f} routers left"
    return f"{names} lost: no heartbeat for {since}; {left}."


ROUTER_LOST = Kind(
    name="router_lost",
    inhibited_by=(),
    is_fleet_wide=True,
    about="Fires when a router has sent no heartbeat for 30 s and no other router replaced it: one that joined in the "
    "10 min before the loss, or later. After an hour it counts as removed if other routers are present; removing it "
    "from the list of routers ends the alert at once. All routers serve all pools, so one pool's rule is enough. It "
    "evaluates the current state, of which no history is stored: there is no preview.",
    settings=RouterLostSettings,
    sources=frozenset({Source.CONTROL}),
    evaluate=_evaluate_routers,
    summarize=_summarize_routers,
    condition=lambda settings: (
        "a router without a heartbeat and without a replacement"
        + ("" if settings.max_present is None else f", while at most {settings.max_present:g} are present")
    ),
    figure="Routers present",
)


class RoutersApartSettings(CurrentSettings, frozen=True):
    """Settings of ``routers_apart``."""

    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 60.0


class PeersEvidence(Evidence, frozen=True):
    routers: list[str]  # that do not see all others, the first of them
    apart: int
    cut_off: int  # those of them that do not reach the server
    present: int


def _evaluate_peers(_: RoutersApartSettings, view: HistoryView, __: str) -> Findings:
    """Compare the peers of each router that shares its state with the number of the others."""
    control = view.history.control
    if control is None:
        return {POOL: no_data(Reason.NOT_STORED)}
    others = len(control.peers) - 1
    if others < 1:
        return {POOL: no_data(Reason.NO_REPLICAS)}
    apart = [name for name, peers in control.peers.items() if (peers or 0) < others]
    cut_off = [name for name in apart if control.peers[name] is None]
    fewest = min(peers or 0 for peers in control.peers.values())
    result, reason = (Result.BREACH, Reason.BELOW) if apart else (Result.OK, Reason.WITHIN)
    evidence = PeersEvidence(apart[:20], len(apart), len(cut_off), others + 1)
    return {POOL: Finding(result, reason, float(fewest), float(others), unit="count", evidence=evidence)}


def _summarize_peers(_: Scope, __: RoutersApartSettings, finding: Finding[PeersEvidence]) -> str:
    evidence = finding.evidence
    names = ", ".join(evidence.routers[:3]) + (" and others" if evidence.apart > 3 else "")
    server = f"; {evidence.cut_off} of them do not reach the server of shared state" if evidence.cut_off else ""
    counts = f"{evidence.apart} of {evidence.present} routers do not see all others ({names})"
    return f"{counts}{server}. Each places requests without knowing what the others have queued."


ROUTERS_APART = Kind(
    name="routers_apart",
    inhibited_by=(RuleKind.EVALUATOR_LAG,),
    is_fleet_wide=True,
    about="Fires when routers that share their state do not see each other: one cannot reach the server, or uses "
    "another one. Requests are served, but each router places them by what it knows itself, and first tokens come "
    "later. Routers without WARMPATH_ROUTER_STATE_URL are not evaluated. All routers serve all pools, so one pool's "
    "rule is enough. It evaluates the current state, of which no history is stored: there is no preview.",
    settings=RoutersApartSettings,
    sources=frozenset({Source.CONTROL}),
    evaluate=_evaluate_peers,
    summarize=_summarize_peers,
    condition=lambda _: "a router that shares its state sees fewer others than there are",
    figure="Fewest peers of a router",
)


class EvaluatorLagSettings(RuleSettings, frozen=True):
    """Settings of ``evaluator_lag``."""

    behind_s: Annotated[
        float,
        setting(
            "seconds",
            "How long there may be no scrape and no evaluation of rules; three scrape intervals are a good start.",
            ge=10,
            le=3600,
        ),
    ] = 15.0
    for_s: ForS = 0.0
    keep_firing_s: KeepFiringS = 60.0

    @property
    def step_s(self) -> float:
        return self.behind_s

    @property
    def lookback_s(self) -> float:
        return max(3600.0, self.behind_s)  # long enough to tell an outage from a fleet that was never scraped


class LagEvidence(Evidence, frozen=True):
    what: Literal["evaluated", "scraped"]  # what was not done


def _evaluate_lag(settings: EvaluatorLagSettings, view: HistoryView, _: str) -> Findings:
    """Whether the last evaluation, or the last attempted scrape, was too long ago."""
    if not view.history.replicas:
        return {POOL: no_data(Reason.NO_REPLICAS)}
    since_evaluation_s = view.history.control.since_evaluation_s if view.history.control else 0.0
    if since_evaluation_s >= settings.behind_s:
        return {POOL: above_limit(since_evaluation_s, settings.behind_s, "seconds", LagEvidence("evaluated"))}
    if any(view.engine(name) is not None for name in view.history.replicas):
        return {POOL: Finding(Result.OK, Reason.WITHIN, 0.0, settings.behind_s, unit="seconds")}
    since_scrape_s = view.since_any_scrape_s(settings.lookback_s)
    if since_scrape_s is None:
        return {POOL: no_data(Reason.NO_READINGS)}  # scraping has not begun
    return {POOL: above_limit(since_scrape_s, settings.behind_s, "seconds", LagEvidence("scraped"))}


def _summarize_lag(scope: Scope, _: EvaluatorLagSettings, finding: Finding[LagEvidence]) -> str:
    if finding.evidence.what == "evaluated":
        return f"Alert rules were not evaluated for {duration(finding.value)}: alerts of that time may be missing."
    return f"No replica of {scope} was scraped for {duration(finding.value)}: its figures are out of date."


EVALUATOR_LAG = Kind(
    name="evaluator_lag",
    inhibited_by=(),
    is_fleet_wide=True,
    about="Fires when scraping stopped or rules were evaluated late: the worker is overloaded or was down, or its "
    "database was. While it fires, all other figures of the pool are out of date. If no worker evaluates rules for "
    "30 s, a web process sends this alert. If web processes are down too, only an external heartbeat monitor reports "
    "it.",
    settings=EvaluatorLagSettings,
    sources=frozenset({Source.ENGINES, Source.CONTROL}),
    evaluate=_evaluate_lag,
    summarize=_summarize_lag,
    condition=lambda settings: f"no scrape, or no evaluation of rules, for {duration(settings.behind_s)}",
    figure="Telemetry delay",
)


class NoDataSettings(WindowSettings, frozen=True):
    """Settings of ``no_data``."""

    window_s: WindowS = 60.0
    for_s: ForS = 60.0
    keep_firing_s: KeepFiringS = 30.0

    @property
    def lookback_s(self) -> float:
        return STARTING_S + self.window_s  # to tell a replica that starts from one that was scraped before


class NoDataEvidence(Evidence, frozen=True):
    replicas: int
    failed: int  # replicas whose scrapes fail


def _evaluate_no_data(_: NoDataSettings, view: HistoryView, __: str) -> Findings:
    """Whether a scrape of any replica succeeded."""
    replicas = view.history.replicas
    if not replicas:
        return {POOL: no_data(Reason.NO_REPLICAS)}
    if all(view.is_starting(name) for name in replicas):
        return {POOL: no_data(Reason.STARTING)}
    steps = [view.engine(name) for name in replicas]
    read = sum(step is not None and step.read for step in steps)
    if read:
        result, reason = Result.OK, Reason.WITHIN
    elif any(view.is_serving(name) for name in replicas):
        result, reason = Result.OK, Reason.SERVING
    else:
        result, reason = Result.BREACH, Reason.NO_READINGS
    evidence = NoDataEvidence(len(steps), sum(step is not None and step.failed for step in steps))
    return {POOL: Finding(result, reason, float(read), 1.0, unit="count", evidence=evidence)}


def _summarize_no_data(scope: Scope, settings: NoDataSettings, finding: Finding[NoDataEvidence]) -> str:
    failed, count = finding.evidence.failed, finding.evidence.replicas
    reason = f"scrapes of {failed} of {count} replicas fail" if failed else f"none of {count} replicas was scraped"
    return f"No data of {scope} for {duration(settings.window_s)}: {reason}."


NO_DATA = Kind(
    name="no_data",
    inhibited_by=(RuleKind.EVALUATOR_LAG,),
    about="Fires when no replica of the pool could be scraped and no router reports one up. Every other rule of the "
    "pool then has no result: without this rule, an outage would look like a healthy pool.",
    settings=NoDataSettings,
    sources=frozenset({Source.ENGINES, Source.SCRAPES}),
    evaluate=_evaluate_no_data,
    summarize=_summarize_no_data,
    condition=lambda settings: f"no successful scrape of any replica for {duration(settings.window_s)}",
    figure="Replicas scraped",
)
