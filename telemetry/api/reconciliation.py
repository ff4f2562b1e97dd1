"""The door to whether engines, answers and predictions tell of the same hit rate (H17)."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.exchange import Exchange
from telemetry.api.serializers import SeriesQuery
from telemetry.api.viewsets import among
from telemetry.services.figures.reconciliation import LONGEST_S, Reconciled, reconcile


class ReconciliationQuery(SeriesQuery):
    """What it is asked with. Without ``from`` the last hour."""

    metric = None  # type: ignore[assignment]  # DRF's way to leave a field out
    by = None  # type: ignore[assignment]
    step = None  # type: ignore[assignment]

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """A window of a day at most."""
        asked = super().validate(attrs)
        if asked["window"].length_s > LONGEST_S:
            raise serializers.ValidationError({"from": "expected a day at most"})
        return asked


class SideSerializer(serializers.Serializer[Any]):
    """One of the three."""

    ratio = serializers.FloatField(allow_null=True, help_text="cached / prompt tokens, 0 to 1; null: unknown")
    requests = serializers.IntegerField(allow_null=True, help_text="that it is of")


class ReconciledSerializer(serializers.Serializer[Any]):
    """One replica."""

    pool = serializers.CharField()
    replica = serializers.CharField()
    engine = SideSerializer(help_text="its counters, at admission")
    answers = SideSerializer(help_text="what its answers told the routers")
    prediction = SideSerializer(help_text="what routers predicted, of answers that told")
    not_eligible_tokens = serializers.IntegerField(allow_null=True, help_text="prompt tokens that were not looked up")
    points = serializers.FloatField(allow_null=True, help_text="the greatest difference of a pair, in points of 100")
    verdict = serializers.CharField(help_text="agree, disagree, too_few or not_reported")
    reason = serializers.CharField()
    not_reported = serializers.ListField(child=serializers.CharField(), help_text="figures that its engine has not")
    notes = serializers.ListField(child=serializers.CharField(), help_text="what to know before believing its figures")


class ReconciliationAnswer(serializers.Serializer[Any]):
    """Every replica."""

    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    replicas = ReconciledSerializer(many=True)


class ReconciliationView(Exchange):
    """Engines' counters, answers and predictions, held against each other."""

    @extend_schema(parameters=[ReconciliationQuery], responses=ReconciliationAnswer)
    def get(self, request: Request) -> Response:
        """Three hit rates of each replica, how far they differ, and what comes of it."""
        query = ReconciliationQuery(data=request.query_params, context={"request": request})
        query.is_valid(raise_exception=True)
        window = query.validated_data["window"]
        rows = reconcile(among(request, query.validated_data.get("pool")), window)
        return Response({"start": window.start, "end": window.end, "replicas": [_shown(row) for row in rows]})


def _shown(row: Reconciled) -> dict[str, Any]:
    return {
        "pool": row.pool,
        "replica": row.replica,
        "engine": {"ratio": row.engine.ratio, "requests": row.engine.requests},
        "answers": {"ratio": row.answers.ratio, "requests": row.answers.answers},
        "prediction": {"ratio": row.answers.predicted_ratio, "requests": row.answers.predicted_answers},
        "not_eligible_tokens": row.engine.not_eligible_tokens,
        "points": row.comparison.points,
        "verdict": row.comparison.agreement,
        "reason": row.comparison.reason,
        "not_reported": row.notes.not_reported,
        "notes": row.notes.notes,
    }
