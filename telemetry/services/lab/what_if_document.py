"""What the replays of a what-if bring: outcomes of the counted requests, the fitted rate, and the result document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import hypot
from typing import Any

import msgspec
import numpy as np

from controlplane.models import Pool
from routing.schema import PoolConfig
from telemetry.lab.chains import Floats, Integers
from telemetry.lab.predictions import (
    Outcome,
    calibrate,
    corrected,
    describe,
    difference,
    figures,
    figures_by_group,
    overload_text,
    timeline,
    verdict,
)
from telemetry.metrics.windows import Window
from telemetry.models import WhatIf
from telemetry.services.lab.breakdowns import breakdown_of
from telemetry.services.lab.what_if_model import WhatIfError, WindowModel, policy_digests

FILL_ERROR = 0.02  # standard error of a hit rate, seen on seeded traffic with a sixteenth of the hashes


def measured_outcome(model: WindowModel) -> Outcome:
    """What was measured of the counted requests."""
    rows, requests = model.counted, model.traffic.requests
    prompt_tokens = model.columns.prompt_tokens[rows]
    cached = np.where(requests.prompt_tokens[rows] > 0, requests.cached_tokens[rows], np.nan)
    rates = np.array([model.rate_of(name) for name in requests.replicas.names])[requests.replicas.codes[rows]]
    return Outcome(
        requests.at_s[rows],
        prompt_tokens,
        cached,
        model.traffic.ttft_s[rows],
        (prompt_tokens - cached) / rates,
        requests.replicas.codes[rows],
        len(requests.replicas.names),
        requests.groups.take(rows),
    )


def _outcome(model: WindowModel, scenario: Mapping[str, Any], result: Mapping[str, Any]) -> Outcome:
    """The replayed outcome of the counted requests. Its TTFT covers the requests whose TTFT was measured."""
    rows, requests = model.counted, model.traffic.requests
    prompt_tokens = model.columns.prompt_tokens[rows]
    cached = _cached_tokens(
        model, np.frombuffer(result["cached_tokens"], np.int64)[rows].astype(np.float64), prompt_tokens
    )
    engines = np.frombuffer(result["engine"], np.int64)[rows]
    ttft_s = np.frombuffer(result["ttft_s"])[rows] + model.fit.overhead_s
    rates = np.array([engine["prefill_rate"] for engine in scenario["engines"]])[engines]
    return Outcome(
        requests.at_s[rows],
        prompt_tokens,
        cached,
        np.where(np.isnan(model.traffic.ttft_s[rows]), np.nan, ttft_s),
        (prompt_tokens - cached) / rates,
        engines,
        len(scenario["engines"]),
        requests.groups.take(rows),
    )


def _cached_tokens(model: WindowModel, replayed: Floats, prompt_tokens: Integers) -> Floats:
    """Cached tokens of replayed prompts.

    Prompts diverge within a block of bytes, on average in its middle, and engines have smaller blocks. So half of the
    difference is added where only a part of the prompt was cached.
    """
    block_tokens, byte_block_tokens = model.columns.block_tokens, model.columns.byte_block_tokens
    engine_tokens: Floats = np.nan_to_num(model.traffic.requests.block_tokens[model.counted], nan=byte_block_tokens)
    partial = np.maximum(0.0, (byte_block_tokens - engine_tokens) / 2)
    is_partial = (replayed > 0) & (replayed < (prompt_tokens - 1) // block_tokens * block_tokens)
    return replayed + np.where(is_partial, partial, 0.0)


def result_document(
    what_if: WhatIf,
    model: WindowModel,
    measured: Outcome,
    scenarios: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The result as JSON values; ``results`` of the scenarios, of which the first is the active policy."""
    if results[0]["reason"]:
        raise WhatIfError(results[0]["reason"])
    outcomes = [
        None if result["reason"] else _outcome(model, scenario, result)
        for scenario, result in zip(scenarios, results, strict=True)
    ]
    baseline = outcomes[0]
    if baseline is None:
        raise AssertionError("its reason was checked")
    is_late = np.arange(len(model.counted)) >= len(model.counted) // 2
    calibration = calibrate(measured, baseline, is_late)
    if calibration.is_calibrated:
        real, replay = figures(measured).hit_rate, figures(baseline).hit_rate
        outcomes = [outcome and corrected(outcome, measured=real, replayed=replay) for outcome in outcomes]
    error = _sampling_error(what_if.pool, model)
    return {
        "counted_from": datetime.fromtimestamp(model.counted_from, UTC).isoformat(),
        "to": datetime.fromtimestamp(float(model.traffic.requests.at_s[-1]), UTC).isoformat(),
        "replayed_requests": len(model.traffic),
        "counted_requests": len(model.counted),
        "sample_ratio": float(model.traffic.requests.sample_ratios.min()),
        "routers": len(model.traffic.routers.names),
        "policies": policy_digests(model.pool),  # of the replayed active policy
        "engine": {
            "prefill_rate": model.fit.prefill_rate,
            "prefill_rate_error": model.fit.rate_error,
            "overhead_s": model.fit.overhead_s,
            "step_s": model.fit.step_s,
            "fitted_requests": model.fit.requests,
            "cache_tokens": dict(model.cache_tokens),
        },
        "calibration": {"is_calibrated": calibration.is_calibrated, **asdict(calibration)},
        "measured": asdict(figures(measured)) | {"timeline": timeline(measured)},
        "candidates": [
            _candidate(
                scenario,
                result,
                outcome,
                outcomes[0] or baseline,
                block_tokens=model.columns.block_tokens,
                is_calibrated=calibration.is_calibrated,
                error=error,
            )
            for scenario, result, outcome in zip(scenarios, results, outcomes, strict=True)
        ],
        "notes": list(model.notes),
    }


def _candidate(
    scenario: Mapping[str, Any],
    result: Mapping[str, Any],
    outcome: Outcome | None,
    baseline: Outcome,
    *,
    block_tokens: int,
    is_calibrated: bool,
    error: float,
) -> dict[str, Any]:
    """Figures of one scenario; the first one is the baseline."""
    pool: PoolConfig = scenario["pool"]
    engines = scenario["engines"]
    overloaded = {engines[index]["target"].partition("#")[0] for index in result["overloaded"]}  # without ranks
    document = {
        "name": scenario["name"],
        "strategy": pool.policy.settings.name,
        "settings": msgspec.to_builtins(pool.policy.settings),
        "replicas": len(pool.replicas),
        "cache_tokens": block_tokens * sum(engine["blocks"] for engine in engines),
        "reason": result["reason"],
        "overloaded_replicas": len(overloaded),
        "figures": None,
        "difference": None,
        "verdict": verdict(None),
        "summary": "",
        "groups": {},
        "timeline": [],
        "reasons": result["reasons"],
    }
    if outcome is None:
        return document
    change = None if outcome is baseline else difference(outcome, baseline, sampling_error=error)
    overload = overload_text(document)
    return document | {
        "figures": asdict(figures(outcome)),
        "difference": change and asdict(change),
        "verdict": verdict(change if is_calibrated else None, overloaded_replicas=len(overloaded)),
        "summary": describe(scenario["name"], change, overload) if change or overload else "",
        "groups": {name: asdict(group) for name, group in figures_by_group(outcome).items()},
        "timeline": timeline(outcome),
    }


def _sampling_error(pool: Pool, model: WindowModel) -> float:
    """Standard error of a hit rate from block sampling: the breakdown's, and that of the ids between sampled blocks."""
    at_s = model.traffic.requests.at_s
    start, end = (datetime.fromtimestamp(float(at), UTC) for at in (model.counted_from, at_s[-1]))
    if end <= start:
        return 0.0
    breakdown = breakdown_of(pool, Window(start, end, (end - start).total_seconds()))
    sampling = 0.0 if breakdown is None else breakdown.ratio(breakdown.standard_error_tokens) or 0.0
    return sampling if float(model.traffic.requests.sample_ratios.min()) >= 1 else hypot(sampling, FILL_ERROR)
