"""``/value``: what caches saved, by week; ``/report``: a pool before and after a time or a rollout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access.actor import visible
from controlplane.api.auth import actor
from controlplane.api.fields import ById, ByName, SchemaField
from controlplane.api.views import TransactionalView
from controlplane.models import Event, Pool, Rollout
from telemetry.services.lab.reports import DEFAULT_SPAN, ReportSide, report_as_json, report_of, report_windows
from telemetry.services.lab.value import STEPS, Amount, value_of


class ValueQuery(serializers.Serializer[Any]):
    """Parameters of ``/value``. Default: all pools, by week, or by day in the first two weeks."""

    pool = ByName(queryset=Pool.objects.all(), required=False)
    by = serializers.ChoiceField(choices=list(STEPS), required=False)
    at = serializers.DateTimeField(required=False, help_text="a time in the period of ``sentence`` and ``notes``")


class ValueRowSerializer(serializers.Serializer[Any]):
    """Figures of some requests; null: unknown."""

    requests = serializers.IntegerField(allow_null=True)
    prompt_tokens = serializers.FloatField(allow_null=True, help_text="of all successful requests")
    saved = SchemaField(Amount, help_text="delivered from prefix caches")
    placement = SchemaField(Amount, help_text="lost to spreading and placement, which a policy could save")
    saved_ratio = serializers.FloatField(allow_null=True, help_text="saved / prompt tokens")
    reported_ratio = serializers.FloatField(allow_null=True, help_text="responses that report cached tokens / all")
    replayed_ratio = serializers.FloatField(allow_null=True, help_text="requests that ``placement`` rests on / all")


class PoolValueSerializer(ValueRowSerializer):
    """A pool."""

    pool = serializers.CharField()


class GroupValueSerializer(PoolValueSerializer):
    """A task group; "": requests without one."""

    group = serializers.CharField(allow_blank=True)


class PeriodSerializer(ValueRowSerializer):
    """One week or day of all pools."""

    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    measured_hours = serializers.FloatField(help_text="for which routers were scraped")
    pools = PoolValueSerializer(many=True)
    groups = GroupValueSerializer(many=True)


class ValueResponse(serializers.Serializer[Any]):
    """What caches saved; periods ascend, at most 52 weeks or 14 days."""

    by = serializers.ChoiceField(choices=list(STEPS))
    currency = serializers.CharField(allow_blank=True)
    sentence = serializers.CharField()
    notes = serializers.ListField(child=serializers.CharField())
    periods = PeriodSerializer(many=True)


class ValueView(TransactionalView):
    """What caches are worth."""

    @extend_schema(parameters=[ValueQuery], responses=ValueResponse)
    def get(self, request: Request) -> Response:
        """Prefill that caches saved and that placement could have saved, in time and money, by week or day."""
        query = ValueQuery(data=request.query_params, context={"request": request})
        query.is_valid(raise_exception=True)
        params: dict[str, Any] = query.validated_data
        pools = [params["pool"]] if "pool" in params else list(visible(actor(request), Pool.objects.all()))
        report = value_of(pools, timezone.now(), by=params.get("by"), at=params.get("at"))
        return Response(report.as_json())


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


class WindowSerializer(serializers.Serializer[Any]):
    """One of the two windows."""

    start = serializers.DateTimeField()
    end = serializers.DateTimeField()


class ReportRowSerializer(serializers.Serializer[Any]):
    """Before, after, and after minus before."""

    before = SchemaField(ReportSide)
    after = SchemaField(ReportSide)
    difference = serializers.DictField(child=serializers.FloatField(allow_null=True))


class ReportGroupSerializer(ReportRowSerializer):
    """A task group; "": requests without one."""

    group = serializers.CharField(allow_blank=True)


class ReportEventSerializer(serializers.Serializer[Any]):
    """A change in between."""

    at = serializers.DateTimeField()
    kind = serializers.CharField()
    summary = serializers.CharField()


class ReportResponse(serializers.Serializer[Any]):
    """The report; ``events`` are at most the newest 50."""

    pool = serializers.CharField()
    windows = serializers.DictField(child=WindowSerializer())
    currency = serializers.CharField(allow_null=True, allow_blank=True)
    figures = ReportRowSerializer()
    groups = ReportGroupSerializer(many=True)
    events = ReportEventSerializer(many=True)
    more_events = serializers.BooleanField()
    limits = serializers.ListField(child=serializers.CharField(), help_text="why a window is shorter than requested")
    no_verdict = serializers.ListField(child=serializers.CharField(), help_text="why the windows allow no conclusion")
    notes = serializers.ListField(child=serializers.CharField())


class ReportView(TransactionalView):
    """A pool before and after."""

    @extend_schema(parameters=[ReportQuery], responses=ReportResponse)
    def get(self, request: Request) -> Response:
        """Hit rate, TTFT, prefill, money and load in two windows, with the changes in between."""
        query = ReportQuery(data=request.query_params, context={"request": request})
        query.is_valid(raise_exception=True)
        params: dict[str, Any] = query.validated_data
        windows = report_windows(
            timezone.now(),
            params["pool"],
            at=params.get("at"),
            rollout=params.get("rollout"),
            span=timedelta(seconds=params["span_s"]),
        )
        events = visible(actor(request), Event.objects.all())
        report = report_of(params["pool"], windows, events)
        return Response({"pool": params["pool"].name, **report_as_json(report)})
