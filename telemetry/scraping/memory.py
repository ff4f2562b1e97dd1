"""What is remembered of a target between two scrapes, as JSON: the raw counters of each of its sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from telemetry.metrics.counters import Mark
from telemetry.metrics.engine import EngineKey
from telemetry.metrics.histograms import ROUTER_EDGES, Buckets
from telemetry.metrics.router import RouteKey

ROUTER_LAYOUT = "router"  # stands for the router's 275 edges


def dump_marks(marks: Mapping[EngineKey, Mark] | Mapping[RouteKey, Mark]) -> dict[str, Any]:
    """Marks by source -> JSON."""
    return {"sources": [{"key": asdict(key), **_dump(mark)} for key, mark in marks.items()]}


def load_engine_marks(document: Mapping[str, Any]) -> dict[EngineKey, Mark]:
    """JSON -> marks by engine; none for a document of another form, which costs one reading of resolution."""
    return {EngineKey(**source["key"]): _load(source) for source in document.get("sources", ())}


def load_route_marks(document: Mapping[str, Any]) -> dict[RouteKey, Mark]:
    """JSON -> marks by key of a router."""
    return {RouteKey(**source["key"]): _load(source) for source in document.get("sources", ())}


def _dump(mark: Mark) -> dict[str, Any]:
    return {
        "at": mark.at_s,
        "taken": mark.taken_s,
        "counters": dict(mark.counters),
        "histograms": {name: _dump_buckets(buckets) for name, buckets in mark.histograms.items()},
        "started": mark.started_s,
        "created": mark.created_s,
        "boot": mark.boot,
    }


def _load(source: Mapping[str, Any]) -> Mark:
    return Mark(
        at_s=source["at"],
        taken_s=source["taken"],
        counters=source["counters"],
        histograms={name: _load_buckets(buckets) for name, buckets in source["histograms"].items()},
        started_s=source["started"],
        created_s=source["created"],
        boot=source["boot"],
    )


def _dump_buckets(buckets: Buckets) -> dict[str, Any]:
    edges = ROUTER_LAYOUT if buckets.edges == ROUTER_EDGES else list(buckets.edges)
    return {"edges": edges, "counts": sorted(buckets.counts.items()), "sum": buckets.sum}


def _load_buckets(document: Mapping[str, Any]) -> Buckets:
    edges = ROUTER_EDGES if document["edges"] == ROUTER_LAYOUT else tuple(document["edges"])
    return Buckets(edges, dict(document["counts"]), document["sum"])
