"""``/ladder``: how far a pool's hit rate is from the reachable share, and what is lost on the way.

The door to whether engines, answers and predictions tell of the same hit rate (H17).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.fields import ByName
from controlplane.api.middleware import Exchange
from controlplane.models import Pool
from telemetry.api.serializers import SeriesQuery, window_of
from telemetry.api.viewsets import among
from telemetry.lab.ladder import LOSS_TEXTS, Ladder, caveats, summary
from telemetry.models import CapacityCurve
from telemetry.services.figures.engine import MAX_WINDOW_S, Reconciled, reconcile
from telemetry.services.lab.ladders import curve_of, ladder_of, ladders_by_group
from telemetry.storage.reachable import reachable_share


class LadderQuery(serializers.Serializer[Any]):
    """What ``/ladder`` is asked with. Without ``from`` the last hour; ``group`` "" asks for requests of no group."""

    pool = ByName(queryset=Pool.objects.all())
    group = serializers.CharField(required=False, allow_blank=True)
    to = serializers.DateTimeField(required=False)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """``from`` is no name that a class body could use."""
        return {**super().get_fields(), "from": serializers.DateTimeField(required=False)}

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Make the window of it."""
        return {**attrs, "window": window_of(attrs)}


class TermSerializer(serializers.Serializer[Any]):
    """One rung: ``tokens`` of the prompts, null where unknown."""

    term = serializers.CharField()
    tokens = serializers.FloatField(allow_null=True)
    ratio = serializers.FloatField(allow_null=True)


class LossSerializer(serializers.Serializer[Any]):
    """One step down, with what to do about it."""

    key = serializers.ChoiceField(choices=list(LOSS_TEXTS))
    tokens = serializers.FloatField()
    ratio = serializers.FloatField()
    about = serializers.CharField()
    advice = serializers.CharField()


class LadderSerializer(serializers.Serializer[Any]):
    """A ladder. ``doubt_ratio`` is the standard error that sampling leaves; ``notes``: what else makes it inexact."""

    group = serializers.CharField(allow_null=True)
    sentence = serializers.CharField()
    requests = serializers.IntegerField()
    prompt_tokens = serializers.FloatField()
    sample_ratio = serializers.FloatField()
    doubt_ratio = serializers.FloatField(allow_null=True)
    reported_ratio = serializers.FloatField()
    terms = TermSerializer(many=True)
    losses = LossSerializer(many=True)
    notes = serializers.ListField(child=serializers.CharField())


class CapacityPointSerializer(serializers.Serializer[Any]):
    """Hit rates where each replica has ``multiple`` times its room."""

    multiple = serializers.FloatField()
    one = serializers.FloatField()
    split = serializers.FloatField()
    shared = serializers.FloatField()


class CurveSerializer(serializers.Serializer[Any]):
    """Hit rate against room, of the last hour's decisions."""

    at = serializers.DateTimeField()
    requests = serializers.IntegerField()
    room_tokens = serializers.IntegerField(allow_null=True)
    points = CapacityPointSerializer(many=True)
    reason = serializers.CharField(allow_blank=True)


class ReachableSerializer(serializers.Serializer[Any]):
    """The reachable share of a window, at least of its last 30 minutes; null below 100 requests or an error above 0.05.

    ``standard_error`` is that of ``ratio``: of block sampling and of the number of requests. ``delivered_ratio`` is
    what responses reported as cached in the same bins.
    """

    ratio = serializers.FloatField()
    standard_error = serializers.FloatField()
    requests = serializers.IntegerField()
    to = serializers.DateTimeField()
    delivered_ratio = serializers.FloatField(allow_null=True)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """``from`` is no name that a class body could use."""
        return {**super().get_fields(), "from": serializers.DateTimeField()}


class LadderAnswer(serializers.Serializer[Any]):
    """Null without any decision in the window; groups by their tokens."""

    pool = serializers.CharField()
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    ladder = LadderSerializer(allow_null=True)
    groups = LadderSerializer(many=True)
    curve = CurveSerializer(allow_null=True)
    reachable = ReachableSerializer(allow_null=True)


class LadderView(Exchange):
    """The hit-rate ladder."""

    @extend_schema(parameters=[LadderQuery], responses=LadderAnswer)
    def get(self, request: Request) -> Response:
        """From all that was reachable down to what was delivered, in bins of five minutes, and what is lost between."""
        query = LadderQuery(data=request.query_params, context={"request": request})
        query.is_valid(raise_exception=True)
        asked: dict[str, Any] = query.validated_data
        pool, window, group = asked["pool"], asked["window"], asked.get("group")
        ladder = ladder_of(pool, window, group)
        reachable = reachable_share([pool.name], window, group=group)
        return Response(
            {
                "pool": pool.name,
                "start": window.start,
                "end": window.end,
                "ladder": ladder and _shown(group, ladder),
                "groups": [_shown(one.group, one.ladder) for one in ladders_by_group(pool, window)],
                "curve": _curve(curve_of(pool)),
                "reachable": reachable and reachable.as_json(),
            }
        )


def _shown(group: str | None, ladder: Ladder) -> dict[str, Any]:
    return {
        "group": group,
        "sentence": summary(ladder),
        "requests": ladder.requests,
        "prompt_tokens": ladder.prompt_tokens,
        "sample_ratio": ladder.sample_ratio,
        "doubt_ratio": ladder.ratio(ladder.doubt_tokens),
        "reported_ratio": ladder.reported_ratio,
        "terms": [{"term": name, "tokens": value, "ratio": ladder.ratio(value)} for name, value in ladder.terms],
        "losses": [
            {**asdict(loss), "about": LOSS_TEXTS[loss.key].about, "advice": LOSS_TEXTS[loss.key].advice}
            for loss in ladder.losses()
        ],
        "notes": caveats(ladder),
    }


def _curve(curve: CapacityCurve | None) -> dict[str, Any] | None:
    if curve is None:
        return None
    return {name: getattr(curve, name) for name in ("at", "requests", "room_tokens", "points", "reason")}


class ReconciliationQuery(SeriesQuery):
    """What it is asked with. Without ``from`` the last hour."""

    metric = None  # type: ignore[assignment]  # DRF's way to leave a field out
    by = None  # type: ignore[assignment]
    step = None  # type: ignore[assignment]

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """A window of a day at most."""
        asked = super().validate(attrs)
        if asked["window"].length_s > MAX_WINDOW_S:
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
        return Response(
            {"start": window.start, "end": window.end, "replicas": [_shown_reconciliation(row) for row in rows]}
        )


def _shown_reconciliation(row: Reconciled) -> dict[str, Any]:
    return {
        "pool": row.pool,
        "replica": row.replica,
        "engine": {"ratio": row.engine.ratio, "requests": row.engine.requests},
        "answers": {"ratio": row.answers.ratio, "requests": row.answers.reported_responses},
        "prediction": {"ratio": row.answers.predicted_ratio, "requests": row.answers.predicted_answers},
        "not_eligible_tokens": row.engine.not_eligible_tokens,
        "points": row.comparison.points,
        "verdict": row.comparison.agreement,
        "reason": row.comparison.reason,
        "not_reported": row.notes.not_reported,
        "notes": row.notes.notes,
    }
