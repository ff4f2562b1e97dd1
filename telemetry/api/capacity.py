"""``/capacity``: a pool's KV cache in bytes, prefill, capacity sweep, a shared cache, and response caches.

``/response-caches``: what the response caches of a pool or task group answered. ``/scaling``: a pool's saturation,
waiting work and recommended replicas, for autoscalers. ``/value``: what caches saved, by week. ``/report``: a pool
before and after a time or a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Annotated, Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema
from msgspec import Meta, to_builtins
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access.actor import visible
from controlplane.api.auth import actor
from controlplane.api.fields import ById, ByName, serializer_of
from controlplane.api.views import TransactionalView
from controlplane.api.viewsets.base import validated_query
from controlplane.models import Event, Pool, Rollout
from telemetry.api.breakdown import BreakdownQuery
from telemetry.lab.shared_cache import tier_parameters, tiers_of
from telemetry.services.figures.semantic_cache import PrecisionPoint, RouterRow, semantic_cache_of
from telemetry.services.lab.costs import ResponseCacheFigures, response_cache_figures
from telemetry.services.lab.reports import DEFAULT_SPAN, Report, events_between, report_of, report_windows
from telemetry.services.lab.scaling import PoolScaling, scaling_of
from telemetry.services.lab.sizing import Sizing, sizing_of
from telemetry.services.lab.value import STEPS, Period, value_of


class CapacityQuery(BreakdownQuery):
    """Parameters of ``/capacity``. Default ``from``: a day before ``to``."""

    group = None  # type: ignore[assignment]  # DRF's way to leave a field out

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Add latency and bandwidth of each tier."""
        return {
            **super().get_fields(),
            **{
                name: serializers.FloatField(
                    required=False, min_value=low, max_value=high, help_text=f"{label}; default {default:g}"
                )
                for name, (label, default, (low, high)) in tier_parameters().items()
            },
        }

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Add the window."""
        end = attrs.get("to") or timezone.now()
        try:
            return super().validate({"from": end - timedelta(days=1), **attrs, "to": end})
        except OverflowError:
            raise serializers.ValidationError({"to": "expected a later time"}) from None


class CapacityView(TransactionalView):
    """Capacity and cost of a pool."""

    @extend_schema(parameters=[CapacityQuery], responses=serializer_of(Sizing))
    def get(self, request: Request) -> Response:
        """Prefill a day in time and money, the newest capacity sweep, and what other caches would bring."""
        params = validated_query(CapacityQuery, request)
        return Response(to_builtins(sizing_of(params["pool"], params["window"], tiers_of(params))))


@dataclass(frozen=True, slots=True)
class SemanticEvidence:
    """A semantic cache at each router, and the precision of its responses."""

    routers: list[RouterRow]
    points: Annotated[list[PrecisionPoint], Meta(description="ascending; only those with checks")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCaches(ResponseCacheFigures):
    """What exact and semantic caches answered from ``start`` to ``end``; null: unknown."""

    pool: str
    group: Annotated[str | None, Meta(description="null: all")]
    start: datetime
    end: datetime
    semantic: Annotated[
        SemanticEvidence | None, Meta(description="null: no group was named, or it has no semantic cache")
    ]


class ResponseCachesView(TransactionalView):
    """What the response caches of a pool, or of one of its task groups, answered."""

    @extend_schema(parameters=[BreakdownQuery], responses=serializer_of(ResponseCaches))
    def get(self, request: Request) -> Response:
        """Requests, tokens, prefill time and money that no replica had to spend, and evidence of a semantic cache."""
        params = validated_query(BreakdownQuery, request)
        pool, window, name = params["pool"], params["window"], params.get("group")
        figures = response_cache_figures([pool], window, group=name)
        group = None if name is None else pool.groups.filter(name=name).first()
        semantic = semantic_cache_of(group, pool.name)
        known: dict[str, Any] = {field.name: getattr(figures, field.name) for field in fields(figures)}
        body = ResponseCaches(
            **known,
            pool=pool.name,
            group=name,
            start=window.start,
            end=window.end,
            semantic=None if semantic is None else SemanticEvidence(semantic.routers, semantic.points),
        )
        return Response(to_builtins(body))


class ScalingQuery(serializers.Serializer[Any]):
    """Parameters of ``/scaling``."""

    pool = ByName(queryset=Pool.objects.all())


class ScalingView(TransactionalView):
    """Scaling signals of a pool."""

    @extend_schema(parameters=[ScalingQuery], responses=serializer_of(PoolScaling))
    def get(self, request: Request) -> Response:
        """Saturation, waiting work and recommended replicas of a pool, as of the newest scrapes."""
        params = validated_query(ScalingQuery, request)
        return Response(to_builtins(scaling_of([params["pool"]], timezone.now())[0]))


class ValueQuery(serializers.Serializer[Any]):
    """Parameters of ``/value``. Default: all pools, by week, or by day in the first two weeks."""

    pool = ByName(queryset=Pool.objects.all(), required=False)
    by = serializers.ChoiceField(choices=list(STEPS), required=False)
    at = serializers.DateTimeField(required=False, help_text="a time in the period of ``sentence`` and ``notes``")


@dataclass(frozen=True, slots=True)
class ValueResponse:
    """What caches saved; periods ascend, at most 52 weeks or 14 days."""

    by: Annotated[str, Meta(description=" or ".join(STEPS))]
    currency: str
    sentence: str
    notes: list[str]
    periods: list[Period]


class ValueView(TransactionalView):
    """What caches are worth."""

    @extend_schema(parameters=[ValueQuery], responses=serializer_of(ValueResponse))
    def get(self, request: Request) -> Response:
        """Prefill that caches saved and that placement could have saved, in time and money, by week or day."""
        params = validated_query(ValueQuery, request)
        pools = [params["pool"]] if "pool" in params else list(visible(actor(request), Pool.objects.all()))
        report = value_of(pools, timezone.now(), by=params.get("by"), at=params.get("at"))
        body = ValueResponse(report.by, report.currency, report.sentence, report.notes, report.periods)
        return Response(to_builtins(body))


class ReportQuery(serializers.Serializer[Any]):
    """Parameters of ``/report``: a pool and a time, or a rollout. Default ``at``: one ``span_s`` ago."""

    pool = ByName(queryset=Pool.objects.all(), required=False)
    rollout = ById(queryset=Rollout.objects.select_related("revision__policy__pool"), required=False)
    at = serializers.DateTimeField(required=False)
    span_s = serializers.FloatField(
        default=DEFAULT_SPAN.total_seconds(), min_value=0, max_value=1e8, help_text="length of each window, seconds"
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """The pool of the rollout, or the named one."""
        if ("pool" in attrs) == ("rollout" in attrs):
            raise serializers.ValidationError({"pool": "expected either pool or rollout"})
        if "rollout" in attrs:
            attrs["pool"] = attrs["rollout"].revision.policy.pool
        return attrs


@dataclass(frozen=True, slots=True)
class ReportEvent:
    """A change in between."""

    at: datetime
    kind: str
    summary: str


@dataclass(frozen=True, slots=True)
class ReportResponse(Report):
    """The report; ``events`` are at most the newest 50."""

    events: list[ReportEvent]
    more_events: bool


class ReportView(TransactionalView):
    """A pool before and after."""

    @extend_schema(parameters=[ReportQuery], responses=serializer_of(ReportResponse))
    def get(self, request: Request) -> Response:
        """Hit rate, TTFT, prefill, money and load in two windows, with the changes in between."""
        params = validated_query(ReportQuery, request)
        windows = report_windows(
            timezone.now(),
            params["pool"],
            at=params.get("at"),
            rollout=params.get("rollout"),
            span=timedelta(seconds=params["span_s"]),
        )
        report = report_of(params["pool"], windows)
        rows, more = events_between(params["pool"], windows, visible(actor(request), Event.objects.all()))
        events = [ReportEvent(row.at, row.kind, row.summary) for row in rows]
        known: dict[str, Any] = {field.name: getattr(report, field.name) for field in fields(report)}
        return Response(to_builtins(ReportResponse(**known, events=events, more_events=more)))
