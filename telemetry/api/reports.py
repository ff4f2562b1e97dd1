"""``/value``: what caches saved, by week; ``/report``: a pool before and after a time or a rollout."""

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
from telemetry.services.lab.reports import DEFAULT_SPAN, Report, events_between, report_of, report_windows
from telemetry.services.lab.value import STEPS, Period, value_of


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
