"""What-ifs with a result, for tests of pages and of publishing."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from controlplane.models import PolicyRevision, Pool
from telemetry.models import WhatIf, WhatIfState
from telemetry.services.lab.what_ifs import candidate_of_draft


def finished_what_if(pool: Pool, end: datetime) -> WhatIf:
    """Three candidates of an hour until ``end``: one better, one worse, one that cannot run."""
    start = end - timedelta(hours=1)
    active = stored_candidate("active policy", start, 0.45, 0.6, None)
    return WhatIf.objects.create(
        pool=pool,
        start=start,
        end=end,
        state=WhatIfState.DONE,
        progress_ratio=1.0,
        ended_at=end,
        candidates=[{"name": name} for name in ("lowest_cost", "random", "cache of 1000 tokens")],
        result={
            "counted_from": (start + timedelta(minutes=20)).isoformat(),
            "to": end.isoformat(),
            "replayed_requests": 1800,
            "counted_requests": 1200,
            "sample_ratio": 1.0,
            "routers": 1,
            "engine": {
                "prefill_rate": 8000.0,
                "overhead_s": 0.01,
                "step_s": 0.01,
                "fitted_requests": 1700,
                "cache_tokens": {"gpu-1": 131072},
            },
            "calibration": {
                "is_calibrated": True,
                "problems": [],
                "measured": active["figures"],
                "replayed": active["figures"],
            },
            "measured": {**active["figures"], "timeline": active["timeline"]},
            "candidates": [
                active,
                stored_candidate("lowest_cost", start, 0.82, 0.12, "better"),
                stored_candidate("random", start, 0.40, 0.7, "worse"),
                {
                    **stored_candidate("cache of 1000 tokens", start, 0.0, 0.0, "unknown"),
                    "figures": None,
                    "timeline": [],
                }
                | {"reason": "The cache of a replica is too small."},
            ],
            "notes": ["No request has a session key: a conversation is identified by its prompt."],
        },
    )


def finished_sweep(pool: Pool, end: datetime) -> WhatIf:
    """A capacity sweep around four replicas: three, five, and twice the cache."""
    sweep = finished_what_if(pool, end)
    sweep.candidates = [
        {"name": "3 replicas", "replicas": 3},
        {"name": "5 replicas", "replicas": 5},
        {"name": "cache x 2", "cache_tokens": 262_144},
    ]
    active, better, worse = sweep.result["candidates"][:3]
    sizes = ((active, 4, 524_288), (worse, 3, 393_216), (better, 5, 655_360), (better, 4, 1_048_576))
    sweep.result["candidates"] = [
        {**row, "replicas": replicas, "cache_tokens": tokens} for row, replicas, tokens in sizes
    ]
    sweep.save()
    return sweep


def stored_candidate(name: str, start: datetime, hit_rate: float, ttft_s: float, verdict: str | None) -> dict[str, Any]:
    figures = {
        "requests": 1200,
        "prompt_tokens": 6_000_000,
        "hit_rate": hit_rate,
        "ttft_mean_s": ttft_s,
        "ttft_p50_s": ttft_s,
        "ttft_p95_s": 3 * ttft_s,
        "ttft_p99_s": 5 * ttft_s,
        "prefill_gpu_s": 400.0,
        "load_max_over_mean": 1.05,
    }
    interval = {"value": hit_rate - 0.45, "low": hit_rate - 0.47, "high": hit_rate - 0.43}
    difference = dict.fromkeys(("hit_rate", "ttft_p50", "ttft_p95", "prefill"), interval)
    return {
        "name": name,
        "strategy": name,
        "settings": {},
        "replicas": 4,
        "cache_tokens": 524_288,
        "reason": "",
        "figures": figures,
        "difference": None if verdict is None else difference,
        "verdict": verdict or "unknown",
        "summary": "" if verdict is None else f"{name}: hit rate +35 to +39 points",
        "groups": {"agents": figures, "": figures},
        "timeline": [
            {"at": start.timestamp() + 60 * minute, "hit_rate": hit_rate, "ttft_p50_s": ttft_s}
            for minute in range(20, 60)
        ],
        "reasons": {"hit": 1000, "cold": 200},
    }


def predict_draft(
    draft: PolicyRevision,
    *,
    hit_rate: tuple[float, float] | None = (0.0, 0.01),
    ttft: tuple[float, float] = (0.0, 0.05),
    is_calibrated: bool = True,
    overloaded: tuple[int, int] = (0, 0),
    verdict: str = "same",
    age: timedelta = timedelta(minutes=5),
    **fields: Any,
) -> WhatIf:
    """A finished what-if of a draft. ``hit_rate`` and ``ttft``: difference from the active policy, and its error.

    ``overloaded``: replicas under the draft, and under the active policy.
    """
    end = timezone.now() - age
    live = PolicyRevision.objects.filter(policy__pool=draft.policy.pool, state="live").select_related("policy")
    what_if = finished_what_if(draft.policy.pool, end)
    active, *_ = what_if.result["candidates"]
    predicted = stored_candidate("draft", end, 0.45 + (hit_rate or (0, 0))[0], 0.6 * (1 + ttft[0]), verdict)
    predicted["difference"] = {
        "hit_rate": hit_rate and _interval(*hit_rate),
        "ttft_p50": _interval(*ttft),
        "ttft_p95": _interval(*ttft),
        "prefill": None,
    }
    predicted["overloaded_replicas"], active["overloaded_replicas"] = overloaded
    if overloaded[0]:
        predicted["verdict"] = "overload"
    what_if.candidates = [candidate_of_draft(draft)]
    what_if.result |= {
        "candidates": [active, predicted],
        "policies": {revision.policy.name: revision.digest for revision in live},
        "calibration": {
            **what_if.result["calibration"],
            "is_calibrated": is_calibrated,
            "problems": [] if is_calibrated else ["Only 20 requests were counted; 100 are needed."],
        },
    }
    for name, value in fields.items():
        setattr(what_if, name, value)
    what_if.save()
    return what_if


def _interval(value: float, error: float) -> dict[str, float]:
    return {"value": value, "low": value - error, "high": value + error}
