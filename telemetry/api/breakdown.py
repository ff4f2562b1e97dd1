"""``/breakdown``: a pool's hit-rate breakdown. ``/reconciliation``: three hit rates of each replica compared."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from drf_spectacular.utils import extend_schema
from msgspec import to_builtins
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.fields import ByName, SchemaField
from controlplane.api.views import TransactionalView
from controlplane.api.viewsets.base import validated_query
from controlplane.models import Pool
from telemetry.api.serializers import SeriesQuery, WindowQuery
from telemetry.api.viewsets import selected_pools
from telemetry.lab.breakdown import LOSS_TEXTS, Breakdown, caveats, summary
from telemetry.lab.cache_grid import CapacityPoint
from telemetry.models import CapacityCurve
from telemetry.services.figures.engine import MAX_WINDOW_S, Reconciled, reconcile
from telemetry.services.figures.overview import Fleet, Subject
from telemetry.services.lab.breakdowns import Worth, breakdown_of, breakdowns_by_group, curve_of, worth_of
from telemetry.storage.reachable import reachable_share


class BreakdownQuery(WindowQuery):
    """Parameters of ``/breakdown``. Default ``from``: one hour ago. ``group`` "": requests without a task group."""

    pool = ByName(queryset=Pool.objects.all())
    group = serializers.CharField(required=False, allow_blank=True)


class TermSerializer(serializers.Serializer[Any]):
    """One term of the breakdown, in prompt tokens; null: unknown."""

    term = serializers.CharField()
    tokens = serializers.FloatField(allow_null=True)
    ratio = serializers.FloatField(allow_null=True)


class LossSerializer(serializers.Serializer[Any]):
    """Tokens lost in one step of the breakdown, with advice."""

    key = serializers.ChoiceField(choices=list(LOSS_TEXTS))
    tokens = serializers.FloatField()
    ratio = serializers.FloatField()
    about = serializers.CharField()
    advice = serializers.CharField()


class BreakdownSerializer(serializers.Serializer[Any]):
    """A breakdown. ``standard_error_ratio``: standard error from sampling; ``notes``: other limits of its accuracy."""

    group = serializers.CharField(allow_null=True)
    summary = serializers.CharField()
    requests = serializers.IntegerField()
    prompt_tokens = serializers.FloatField()
    sample_ratio = serializers.FloatField()
    standard_error_ratio = serializers.FloatField(allow_null=True)
    reported_ratio = serializers.FloatField()
    terms = TermSerializer(many=True)
    losses = LossSerializer(many=True)
    notes = serializers.ListField(child=serializers.CharField())


class CurveSerializer(serializers.Serializer[Any]):
    """Hit rate by cache size, from the last hour's decisions."""

    at = serializers.DateTimeField()
    requests = serializers.IntegerField()
    cache_tokens = serializers.IntegerField(allow_null=True)
    points = SchemaField(list[CapacityPoint])
    reason = serializers.CharField(allow_blank=True)


class ReachableSerializer(serializers.Serializer[Any]):
    """Reachable hit rate of a window, over at least 30 minutes; null below 100 requests or with an error above 0.05.

    ``standard_error`` of ``ratio`` is from block sampling and the number of requests. ``delivered_ratio`` is the hit
    rate that responses reported in the same bins.
    """

    ratio = serializers.FloatField()
    standard_error = serializers.FloatField()
    requests = serializers.IntegerField()
    to = serializers.DateTimeField()
    delivered_ratio = serializers.FloatField(allow_null=True)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Add ``from``, which is a keyword in a class body."""
        return {**super().get_fields(), "from": serializers.DateTimeField()}


class BreakdownResponse(serializers.Serializer[Any]):
    """``breakdown`` is null without decisions in the window; groups are sorted by tokens."""

    pool = serializers.CharField()
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    breakdown = BreakdownSerializer(allow_null=True)
    groups = BreakdownSerializer(many=True)
    curve = CurveSerializer(allow_null=True)
    reachable = ReachableSerializer(allow_null=True)
    worth = SchemaField(Worth)


class BreakdownView(TransactionalView):
    """The hit-rate breakdown."""

    @extend_schema(parameters=[BreakdownQuery], responses=BreakdownResponse)
    def get(self, request: Request) -> Response:
        """The breakdown from the reachable to the delivered hit rate, in five-minute bins, with each step's loss."""
        params = validated_query(BreakdownQuery, request)
        pool, window, group = params["pool"], params["window"], params.get("group")
        breakdown = breakdown_of(pool, window, group)
        reachable, curve = reachable_share([pool.name], window, group=group), curve_of(pool)
        return Response(
            {
                "pool": pool.name,
                "start": window.start,
                "end": window.end,
                "breakdown": breakdown and _as_json(group, breakdown),
                "groups": [_as_json(row.group, row.breakdown) for row in breakdowns_by_group(pool, window)],
                "curve": _curve_as_json(curve),
                "reachable": reachable and reachable.as_json(),
                "worth": to_builtins(worth_of(pool, window, curve)),
            }
        )


def _as_json(group: str | None, breakdown: Breakdown) -> dict[str, Any]:
    return {
        "group": group,
        "summary": summary(breakdown),
        "requests": breakdown.requests,
        "prompt_tokens": breakdown.prompt_tokens,
        "sample_ratio": breakdown.sample_ratio,
        "standard_error_ratio": breakdown.ratio(breakdown.standard_error_tokens),
        "reported_ratio": breakdown.reported_ratio,
        "terms": [{"term": name, "tokens": value, "ratio": breakdown.ratio(value)} for name, value in breakdown.terms],
        "losses": [
            {**asdict(loss), "about": LOSS_TEXTS[loss.key].about, "advice": LOSS_TEXTS[loss.key].advice}
            for loss in breakdown.losses()
        ],
        "notes": caveats(breakdown),
    }


def _curve_as_json(curve: CapacityCurve | None) -> dict[str, Any] | None:
    if curve is None:
        return None
    return {name: getattr(curve, name) for name in ("at", "requests", "cache_tokens", "points", "reason")}


class ReconciliationQuery(SeriesQuery):
    """Parameters of ``/reconciliation``. Default ``from``: one hour ago."""

    metric = None  # type: ignore[assignment]  # DRF's way to leave a field out
    by = None  # type: ignore[assignment]
    step = None  # type: ignore[assignment]

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Limit the window to one day."""
        params = super().validate(attrs)
        if params["window"].length_s > MAX_WINDOW_S:
            raise serializers.ValidationError({"from": "expected at most one day before to"})
        return params


class SideSerializer(serializers.Serializer[Any]):
    """One of the three hit rates."""

    ratio = serializers.FloatField(allow_null=True, help_text="cached / prompt tokens, 0 to 1; null: unknown")
    requests = serializers.IntegerField(allow_null=True, help_text="requests that it covers")


class ReconciledSerializer(serializers.Serializer[Any]):
    """Reconciliation of one replica."""

    pool = serializers.CharField()
    replica = serializers.CharField()
    engine = SideSerializer(help_text="engine counters, at admission")
    responses = SideSerializer(help_text="usage in its responses")
    prediction = SideSerializer(help_text="router predictions, for responses with usage")
    not_eligible_tokens = serializers.IntegerField(allow_null=True, help_text="prompt tokens without a cache lookup")
    points = serializers.FloatField(allow_null=True, help_text="largest difference of two of them, percentage points")
    verdict = serializers.CharField(help_text="agree, disagree, too_few or not_reported")
    reason = serializers.CharField()
    not_reported = serializers.ListField(
        child=serializers.CharField(), help_text="figures that its engine does not report"
    )
    notes = serializers.ListField(child=serializers.CharField(), help_text="limits of the accuracy of its figures")


class ReconciliationResponse(serializers.Serializer[Any]):
    """Reconciliation of all replicas."""

    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    replicas = ReconciledSerializer(many=True)


class ReconciliationView(TransactionalView):
    """Reconciliation of engine counters, response usage and router predictions."""

    @extend_schema(parameters=[ReconciliationQuery], responses=ReconciliationResponse)
    def get(self, request: Request) -> Response:
        """Three hit rates of each replica, their largest difference, and the verdict."""
        params = validated_query(ReconciliationQuery, request)
        window = params["window"]
        pools = selected_pools(request, params.get("pool"))
        rows = reconcile(Fleet(Subject(pools)), window)
        return Response(
            {"start": window.start, "end": window.end, "replicas": [_reconciliation_as_json(row) for row in rows]}
        )


def _reconciliation_as_json(row: Reconciled) -> dict[str, Any]:
    return {
        "pool": row.pool,
        "replica": row.replica,
        "engine": {"ratio": row.engine.ratio, "requests": row.engine.requests},
        "responses": {"ratio": row.responses.ratio, "requests": row.responses.reported_responses},
        "prediction": {"ratio": row.responses.predicted_ratio, "requests": row.responses.predicted_responses},
        "not_eligible_tokens": row.engine.not_eligible_tokens,
        "points": row.comparison.points,
        "verdict": row.comparison.agreement,
        "reason": row.comparison.reason,
        "not_reported": row.notes.not_reported,
        "notes": row.notes.notes,
    }
