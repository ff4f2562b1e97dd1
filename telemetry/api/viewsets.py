"""Views of channels, deliveries, ``/series`` and ``/prompts``, with their filters."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.utils import timezone
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access.actor import visible
from controlplane.api.auth import actor, signed_in_user
from controlplane.api.filters import InstantFilter
from controlplane.api.pagination import NewestFirst
from controlplane.api.views import TransactionalView
from controlplane.api.viewsets.base import NUMBER, CrudViewSet, ReadViewSet, validated_query
from controlplane.errors import InvalidError
from controlplane.models import Pool
from telemetry.api import serializers as s
from telemetry.channels import KINDS
from telemetry.metrics.windows import Series
from telemetry.models import AlertRule, Channel, Notification, NotificationKind, NotificationState, RuleKind
from telemetry.services.figures.figures import FIGURES, Figure
from telemetry.services.figures.overview import Kind, Pools, Subject
from telemetry.services.figures.series import fit_window
from telemetry.services.lab.decisions import lint_prompts
from telemetry.services.notifications import channels, outbox


class AlertRuleFilter(filters.FilterSet):
    """``?pool=NAME&kind=KIND&enabled=true``."""

    pool = filters.CharFilter(field_name="pool__name")
    kind = filters.MultipleChoiceFilter(choices=RuleKind.choices)

    class Meta:
        model = AlertRule
        fields = ("pool", "kind", "severity", "enabled")


class DeliveryFilter(filters.FilterSet):
    """``?channel=NAME&state=STATE&kind=KIND&alert=ID``; times are ISO 8601."""

    alert = filters.NumberFilter(method="about", label="a message about this alert, alone or with others")
    channel = filters.CharFilter(field_name="channel__name")
    state = filters.ChoiceFilter(choices=NotificationState.choices)
    kind = filters.ChoiceFilter(choices=NotificationKind.choices)
    after = InstantFilter(field_name="created_at", lookup_expr="gte")
    before = InstantFilter(field_name="created_at", lookup_expr="lt")

    class Meta:
        model = Notification
        fields = ("channel", "state", "kind", "alert", "after", "before")

    def about(self, rows: QuerySet[Notification], _name: str, alert: Decimal) -> QuerySet[Notification]:
        """The messages about an alert, as on the page of deliveries."""
        return outbox.filter_deliveries(rows, alert=int(alert))


# A figure is here over all pools that are asked for.
METRICS = {
    metric: {by: figure for by, figure in figures.items() if Kind.FLEET in figure.kinds}
    for metric, figures in FIGURES.items()
}


def figure_of(metric: str, by: str | None) -> Figure:
    """The figure of a metric, its first one by default; InvalidError for an unknown metric or ``by``."""
    if metric not in METRICS:
        raise InvalidError("$.metric", f"expected one of {', '.join(METRICS)}")
    figures = METRICS[metric]
    if by and by not in figures:
        raise InvalidError("$.by", f"{metric} can be drawn by {' or '.join(figures)}")
    return figures[by or next(iter(figures))]


UUID = "[0-9a-f-]{32,36}"


class DeliveryPages(NewestFirst):
    """Deliveries, the newest first."""

    ordering = ("-created_at", "-id")


def _create_channel(**fields: Any) -> tuple[Channel, str | None]:
    channel = channels.create_channel(**fields)
    return channel, channels.reveal_secret(channel)


class ChannelViewSet(CrudViewSet[Channel]):
    """Notification channels."""

    queryset = Channel.objects.all()
    serializer_class = s.ChannelSerializer
    created_serializer = s.CreatedChannelSerializer
    create_input, change_input = s.ChannelInput, s.ChannelChange
    create_row = staticmethod(_create_channel)
    update_row = staticmethod(channels.update_channel)
    remove_row = staticmethod(channels.delete_channel)
    lookup_value_regex = NUMBER
    shown_once = ("secret",)
    descriptions: ClassVar = {
        "create": "Create a channel; only this response has the secret that signs its messages.",
        "destroy": "Delete a channel and its pending messages.",
    }

    @extend_schema(request=None, responses={202: s.DeliverySerializer})
    @action(detail=True, methods=["post"])
    def test(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Send a test message; 202 with the delivery, whose attempts show the receiver's response."""
        return Response(s.DeliverySerializer(channels.test_send(self.get_object())).data, status.HTTP_202_ACCEPTED)

    @extend_schema(request=None, responses={200: s.RotatedSecretSerializer})
    @action(detail=True, methods=["post"])
    def rotate(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Rotate the secret, shown once; the previous one also signs messages until ``previous_secret`` is null."""
        secret = channels.rotate_secret(self.get_object(), by=signed_in_user(request))
        return Response({"secret": secret}, headers={"Cache-Control": "no-store"})

    @extend_schema(responses=s.ChannelKindSerializer(many=True), filters=False)
    @action(detail=False, methods=["get"], pagination_class=None)
    def kinds(self, request: Request) -> Response:  # noqa: ARG002 - the same for all
        """Kinds of channels with the settings of their ``config``."""
        return Response(s.ChannelKindSerializer(list(KINDS.values()), many=True).data)


class DeliveryViewSet(ReadViewSet[Notification]):
    """Messages with all delivery attempts."""

    queryset = Notification.objects.select_related("channel").prefetch_related("log")
    serializer_class = s.DeliverySerializer
    filterset_class = DeliveryFilter
    pagination_class = DeliveryPages
    lookup_value_regex = UUID

    @extend_schema(request=None, responses={202: s.DeliverySerializer})
    @action(detail=True, methods=["post"])
    def replay(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Send the message again now, with the same id."""
        notification = outbox.replay(self.get_object(), timezone.now())
        return Response(s.DeliverySerializer(notification).data, status.HTTP_202_ACCEPTED)


class SeriesView(TransactionalView):
    """Chart series."""

    @extend_schema(parameters=[s.SeriesQuery], responses=s.SeriesResponse)
    def get(self, request: Request) -> Response:
        """Values by step; null is a gap with its reason in ``state``. A step has the samples read after its start."""
        params = validated_query(s.SeriesQuery, request)
        window = params["window"]
        figure = figure_of(params["metric"], params.get("by"))
        lines = figure.query(Subject(selected_pools(request, params.get("pool"))), fit_window(window))
        body = {
            "metric": figure.metric,
            "by": figure.by,
            "start": window.start,
            "end": window.end,
            "step_s": window.step_s,
            "series": [_series_as_json(line) for line in lines],
        }
        return Response(body)


class PromptsView(TransactionalView):
    """Prompt lint."""

    @extend_schema(parameters=[s.PromptsQuery], responses=s.PromptsResponse)
    def get(self, request: Request) -> Response:
        """Findings of every task group with described prompts, largest loss first."""
        params = validated_query(s.PromptsQuery, request)
        pools = selected_pools(request, params.get("pool"))
        groups = lint_prompts(None if pools is None else [pool.name for pool in pools], timezone.now())
        return Response(s.PromptsResponse({"groups": groups}).data)


def selected_pools(request: Request, pool: Pool | None) -> Pools:
    """The requested pool, else all pools that the actor may see (None: all)."""
    if pool is not None:
        return [pool]
    requester = actor(request)
    return None if requester.projects() is None else list(visible(requester, Pool.objects.all()))


def _series_as_json(line: Series) -> dict[str, Any]:
    bands = line.band or [None] * len(line.points)
    points = [
        {"at": at, "value": value, "state": state, "low": band and band[0], "high": band and _finite_or_none(band[1])}
        for (at, value), state, band in zip(line.points, line.states, bands, strict=True)
    ]
    return {"label": line.label, "note": line.note, "points": points}


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
