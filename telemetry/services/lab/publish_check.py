"""Whether a what-if allows a draft to be published; registered with ``controlplane.services.policies.publish_checks``.

The newest what-if of exactly the draft's settings that has ended decides. It must be calibrated, rest on traffic that
is not too old, and have replayed the settings that are active now as its baseline. A figure exceeds its limit if it is
certainly worse, as in the verdict (the 95 % interval excludes 0), and worse by more than the limit. A draft under which
more replicas are overloaded than under the active policy is worse whatever the limits. A draft within the limits that
is not predicted to be better may be published; the check returns why it is not clearly better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from django.urls import reverse
from django.utils import timezone

from controlplane.models import PolicyRevision, Pool, RevisionState
from controlplane.services.policies.publish_checks import (
    Finding,
    FindingCode,
    PredictedFigure,
    PredictionMode,
    PredictionPolicy,
)
from telemetry.lab.predictions import Interval, Verdict, overload_text
from telemetry.models import WhatIf, WhatIfState
from telemetry.services.lab.what_ifs import candidate_of_draft, what_ifs_of_settings

WITHIN_LIMITS = {  # by verdict, of a draft that may be published
    Verdict.SAME: "The what-if shows no difference beyond its uncertainty.",
    Verdict.MIXED: "One figure is predicted to be better, and another one worse.",
    Verdict.WORSE: "The draft is predicted to be worse, within the pool's limits.",
    Verdict.OVERLOAD: "Replicas are predicted to be overloaded, as under the active policy.",
    Verdict.UNKNOWN: "The what-if has no verdict.",
}
PREDICT_AGAIN = "Predict the draft again on the policy's page, or send the request in links.start."


def check_draft(draft: PolicyRevision, limits: PredictionPolicy) -> Finding | None:
    """What is in doubt about a draft; None if it is predicted to be better. At most 4 queries."""
    open_one = None
    for what_if, number in what_ifs_of_settings(draft):
        if not what_if.is_open:
            return _check(draft, what_if, number, limits)
        open_one = open_one or what_if
    if open_one is not None:
        text = f"Its what-if is {open_one.get_state_display().lower()}."
        return _finding(FindingCode.RUNNING, text, "Try again when it has ended.", draft, open_one)
    text = "No what-if of exactly these settings has been run."
    to_do = f"{PREDICT_AGAIN.replace(' again', '')} A pool without captured traffic cannot be predicted."
    return _finding(FindingCode.MISSING, text, to_do, draft)


def _check(draft: PolicyRevision, what_if: WhatIf, number: int, limits: PredictionPolicy) -> Finding | None:
    if what_if.state == WhatIfState.FAILED:
        return _finding(FindingCode.FAILED, f"Its what-if failed: {what_if.reason}", PREDICT_AGAIN, draft, what_if)
    if reason := _outdated(what_if, draft.policy.pool, limits):
        return _finding(FindingCode.OUTDATED, f"Its what-if is outdated: {reason}", PREDICT_AGAIN, draft, what_if)
    result = what_if.result or {}
    if not result["calibration"]["is_calibrated"]:
        text = f"Its what-if is not calibrated: {result['calibration']['problems'][0]}"
        return _finding(FindingCode.NOT_CALIBRATED, text, PREDICT_AGAIN, draft, what_if)
    active, candidate = what_if.replays[0], what_if.replays[number + 1]
    if candidate["figures"] is None:
        text = f"Its settings could not be replayed: {candidate['reason']}"
        return _finding(FindingCode.FAILED, text, PREDICT_AGAIN, draft, what_if)
    figures = compared_figures(active, candidate, limits)
    is_advised = limits.mode is PredictionMode.ADVISE and candidate["verdict"] == Verdict.WORSE
    if candidate.get("overloaded_replicas", 0) > active.get("overloaded_replicas", 0):
        text = f"The draft is predicted to overload the pool: {overload_text(candidate)}."
        return _finding(FindingCode.WORSE, text, "Change the draft.", draft, what_if, figures)
    exceeded = [figure for figure in figures if figure.is_exceeded or (is_advised and _is_worse(figure))]
    unknown = [figure.title for figure in figures if figure.limit is not None and figure.difference is None]
    if exceeded:
        text = f"The draft is predicted to be worse than the active policy: {'; '.join(map(_text, exceeded))}."
        return _finding(FindingCode.WORSE, text, "Change the draft, or the pool's limits.", draft, what_if, figures)
    if unknown:
        text, to_do = (
            f"No difference from the active policy is known for {', '.join(unknown)}.",
            "Predict more traffic.",
        )
        return _finding(FindingCode.UNKNOWN, text, to_do, draft, what_if, figures)
    if (verdict := Verdict(candidate["verdict"])) is Verdict.BETTER:
        return None
    return _finding(FindingCode.WITHIN_LIMITS, WITHIN_LIMITS[verdict], "", draft, what_if, figures)


def _outdated(what_if: WhatIf, pool: Pool, limits: PredictionPolicy) -> str:
    """Why the what-if no longer describes the pool; "" if it does. A query."""
    age_s = (timezone.now() - what_if.end).total_seconds()
    if age_s > limits.max_age_s:
        return f"its traffic is {age_s / 3600:.0f} h old, at most {limits.max_age_s / 3600:.3g} h are allowed."
    live = PolicyRevision.objects.filter(policy__pool=pool, state=RevisionState.LIVE).select_related("policy")
    replayed: Mapping[str, str] = (what_if.result or {}).get("policies", {})
    active = {revision.policy.name: revision.digest for revision in live}
    changed = sorted(name for name in active.keys() | replayed.keys() if active.get(name) != replayed.get(name))
    return f"the active settings of policy {', '.join(changed)} are not those that it replayed." if changed else ""


def compared_figures(
    active: Mapping[str, Any], candidate: Mapping[str, Any], limits: PredictionPolicy
) -> tuple[PredictedFigure, ...]:
    """Hit rate, TTFT p50 and p95 of a replayed candidate and of the active policy, each with its limit."""
    difference = candidate["difference"] or {}
    drop = limits.max_hit_rate_drop
    rows = (
        ("hit_rate", "Hit rate", "hit_rate", None if drop is None else -drop),
        ("ttft_p50_s", "TTFT p50", "ttft_p50", limits.max_ttft_p50_growth),
        ("ttft_p95_s", "TTFT p95", "ttft_p95", limits.max_ttft_p95_growth),
    )
    figures = (
        PredictedFigure(
            name,
            title,
            active["figures"][name],
            candidate["figures"][name],
            difference.get(key),
            limit,
            is_exceeded=False,
        )
        for name, title, key, limit in rows
    )
    return tuple(replace(figure, is_exceeded=_is_exceeded(figure)) for figure in figures)


def _is_worse(figure: PredictedFigure) -> bool:
    """Whether it is certainly worse than that of the active policy, as in the verdict."""
    worse = -1 if figure.name == "hit_rate" else 1
    return figure.difference is not None and Interval(**figure.difference).sign == worse


def _is_exceeded(figure: PredictedFigure) -> bool:
    """Whether it is certainly worse, and worse by more than its limit."""
    if figure.difference is None or figure.limit is None:
        return False
    return _is_worse(figure) and abs(figure.difference["value"]) > abs(figure.limit)


def _text(figure: PredictedFigure) -> str:
    """``Hit rate 33.0 % instead of 45.0 %, -12 points (-14 to -10), limit -3 points``."""
    predicted, active = (_value(figure, side) for side in (figure.predicted, figure.active))
    return f"{figure.title} {predicted} instead of {active}, {figure.difference_text}, limit {figure.limit_text}"


def _value(figure: PredictedFigure, value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{100 * value:.1f} %" if figure.name == "hit_rate" else f"{value:.3f} s"


def _finding(
    code: FindingCode,
    detail: str,
    to_do: str,
    draft: PolicyRevision,
    what_if: WhatIf | None = None,
    figures: tuple[PredictedFigure, ...] = (),
) -> Finding:
    body = {"pool": draft.policy.pool.name, "candidates": [candidate_of_draft(draft)]}
    links: dict[str, Any] = {"start": {"method": "POST", "url": reverse("telemetry-api:what-if-list"), "body": body}}
    if what_if is not None:
        links["what_if"] = reverse("telemetry-api:what-if-detail", args=[what_if.pk])
        links["page"] = reverse("telemetry:what-if", args=[what_if.pk])
    return Finding(code, detail, to_do, links, figures)
