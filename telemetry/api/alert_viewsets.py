"""Doors to rules, alerts and silences: parse, call one service, answer."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access.actor import visible
from controlplane.api.pagination import NewestFirst
from controlplane.api.permissions import actor, role_needed, signed_in_user
from controlplane.api.viewsets.base import NUMBER, BaseViewSet, parsed
from telemetry.api import alert_serializers as s
from telemetry.api.viewsets import AlertRuleFilter
from telemetry.models import Alert, AlertRule, Silence
from telemetry.services.alerts import alerts, previews, rules, silences
from telemetry.services.alerts.alerts import AlertFilter

# What the evaluator makes of an alert: no change of it is in the way of whoever acknowledges it.
OBSERVED = (
    "state",
    "resolved_at",
    "fired_at",
    "last_breach_at",
    "value",
    "limit",
    "baseline",
    "unit",
    "value_ratio",
    "baseline_ratio",
    "reachable_ratio",
    "summary",
    "detail",
    "causes",
    "muted",
    "told_at",
    "tellings",
    "steps",
)


class AlertPages(NewestFirst):
    """Alerts, the newest first."""

    ordering = ("-started_at", "-id")


class AlertRuleViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[AlertRule]):
    """What raises an alert."""

    queryset = AlertRule.objects.select_related("pool", "group")
    serializer_class = s.AlertRuleSerializer
    filterset_class = AlertRuleFilter
    lookup_value_regex = NUMBER
    observed = ("evaluated_at", "verdict")

    @extend_schema(request=s.AlertRuleInput, responses={201: s.AlertRuleSerializer})
    def create(self, request: Request) -> Response:
        """Create a rule."""
        given = parsed(s.AlertRuleInput, request)
        rule = rules.create_rule(given.pop("pool"), **given, by=signed_in_user(request))
        return Response(s.AlertRuleSerializer(rule).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.AlertRuleChange, responses=s.AlertRuleSerializer)
    def partial_update(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what is given; disabling a rule ends its alerts."""
        changes = parsed(s.AlertRuleChange, request, partial=True)
        rule = rules.update_rule(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.AlertRuleSerializer(rule).data)

    def destroy(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove a rule and its alerts."""
        rules.delete_rule(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=s.PreviewInput, responses=s.PreviewAnswer)
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """What a rule would have done on the stored history. Nothing is made."""
        given = parsed(s.PreviewInput, request)
        found = previews.preview_rule(given.pop("pool"), **given)
        return Response(s.PreviewAnswer(found).data)


class AlertViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[Alert]):
    """Alerts, the newest first; one alone with every step of its life."""

    queryset = Alert.objects.select_related("rule", "pool")
    serializer_class = s.AlertSerializer
    filterset_class = AlertFilter
    pagination_class = AlertPages
    lookup_value_regex = NUMBER
    observed = OBSERVED
    tagged_in_lists = False

    def get_serializer_class(self) -> type[s.AlertSerializer]:
        """The list leaves the steps out."""
        return s.AlertSerializer if self.action == "list" else s.AlertWithSteps

    @extend_schema(request=s.Acknowledgement, responses=s.AlertWithSteps)
    @action(detail=True, methods=["post"])
    def acknowledge(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Take it: it is not told again. 409 if it has ended."""
        alert = self.get_object()
        why = parsed(s.Acknowledgement, request)["note"]
        alerts.acknowledge(alert, by=signed_in_user(request), why=why)
        return self._answer()

    @extend_schema(request=None, responses=s.AlertWithSteps)
    @action(detail=True, methods=["post"])
    def release(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Let it go: it is told again when that is due. 409 if it has ended."""
        alerts.unacknowledge(self.get_object(), by=signed_in_user(request))
        return self._answer()

    def _answer(self) -> Response:
        return Response(s.AlertWithSteps(self.get_object()).data)


class SilenceViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[Silence]):
    """What is not told for a while; those that are over stay, to be looked up."""

    queryset = Silence.objects.select_related("project", "created_by")
    serializer_class = s.SilenceSerializer
    lookup_value_regex = NUMBER

    @extend_schema(request=s.SilenceInput, responses={201: s.SilenceSerializer})
    def create(self, request: Request) -> Response:
        """Silence alerts by their labels until a time."""
        given = _within_reach(request, parsed(s.SilenceInput, request))
        silence = silences.create_silence(**given, by=signed_in_user(request))
        return Response(s.SilenceSerializer(silence).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.SilenceChange, responses=s.SilenceSerializer)
    def partial_update(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Have it end at another time, or say another thing."""
        changes = parsed(s.SilenceChange, request, partial=True)
        silence = silences.update_silence(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.SilenceSerializer(silence).data)

    def destroy(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """End it now."""
        silences.end_silence(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=s.SilencePreviewInput, responses=s.SilencePreview)
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """Which alerts it would be for now. Nothing is made."""
        given = _within_reach(request, parsed(s.SilencePreviewInput, request))
        among = visible(actor(request), alerts.open_alerts())
        found = silences.matched(given["matchers"], project=given.get("project"), among=among)
        return Response({"alerts": s.AlertSerializer(found, many=True).data})


def _within_reach(request: Request, given: dict[str, Any]) -> dict[str, Any]:
    """A silence of all projects is for those whose role suffices in all."""
    needed = role_needed(request)
    if given.get("project") is None and (needed is None or not actor(request).may(needed, None)):
        raise PermissionDenied("Name a project in which you may silence alerts; all at once is for others.")
    return given
