"""REST API of alert rules, alerts and silences."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.decorators import action
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access.actor import visible
from controlplane.api.auth import actor, needed_role_of, signed_in_user
from controlplane.api.pagination import NewestFirst
from controlplane.api.viewsets.base import (
    NUMBER,
    CrudViewSet,
    DestroyMixin,
    ReadViewSet,
    UpdateMixin,
    validated_body,
)
from telemetry.api import alert_serializers as s
from telemetry.api.viewsets import AlertRuleFilter
from telemetry.models import Alert, AlertRule, Silence
from telemetry.services.alerts import alerts, previews, rules
from telemetry.services.alerts.alerts import AlertFilter


class AlertPages(NewestFirst):
    """Alerts, newest first."""

    ordering = ("-started_at", "-id")


class AlertRuleViewSet(CrudViewSet[AlertRule]):
    """REST API of alert rules."""

    queryset = rules.rules()
    serializer_class = s.AlertRuleSerializer
    create_input, change_input = s.AlertRuleInput, s.AlertRuleChange
    create_row = staticmethod(rules.create_rule)
    update_row = staticmethod(rules.update_rule)
    remove_row = staticmethod(rules.delete_rule)
    filterset_class = AlertRuleFilter
    lookup_value_regex = NUMBER
    descriptions: ClassVar = {
        "partial_update": "Change the given fields; disabling a rule resolves its alerts.",
        "destroy": "Delete a rule and its alerts.",
    }

    @extend_schema(request=s.PreviewInput, responses=s.PreviewResponse)
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """Evaluate a rule on the stored history; nothing is stored."""
        params = validated_body(s.PreviewInput, request)
        preview = previews.preview_rule(params.pop("pool"), **params)
        return Response(s.PreviewResponse(preview).data)


class AlertViewSet(ReadViewSet[Alert]):
    """Alerts, newest first; the detail includes the timeline."""

    queryset = Alert.objects.select_related("rule", "pool")
    serializer_class = s.AlertSerializer
    filterset_class = AlertFilter
    pagination_class = AlertPages
    lookup_value_regex = NUMBER

    def get_serializer_class(self) -> type[s.AlertSerializer]:
        """Lists omit the timeline."""
        return s.AlertSerializer if self.action == "list" else s.AlertWithHistory

    @extend_schema(request=s.Acknowledgement, responses=s.AlertWithHistory)
    @action(detail=True, methods=["post"])
    def acknowledge(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Acknowledge: stops further notifications. 409 if the alert has ended."""
        alert = self.get_object()
        note = validated_body(s.Acknowledgement, request)["note"]
        alerts.acknowledge(alert, by=signed_in_user(request), note=note)
        return self._response()

    @extend_schema(request=None, responses=s.AlertWithHistory)
    @action(detail=True, methods=["post"])
    def unacknowledge(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Unacknowledge: notifications are repeated again. 409 if the alert has ended."""
        alerts.unacknowledge(self.get_object(), by=signed_in_user(request))
        return self._response()

    def _response(self) -> Response:
        return Response(s.AlertWithHistory(self.get_object()).data)


class SilenceViewSet(UpdateMixin, DestroyMixin, ReadViewSet[Silence]):
    """Silences; expired ones are kept."""

    queryset = Silence.objects.select_related("project", "created_by")
    serializer_class = s.SilenceSerializer
    change_input = s.SilenceChange
    update_row = staticmethod(alerts.update_silence)
    remove_row = staticmethod(alerts.end_silence)
    lookup_value_regex = NUMBER
    descriptions: ClassVar = {
        "partial_update": "Change the end or the comment.",
        "destroy": "Expire the silence now.",
    }

    @extend_schema(request=s.SilenceInput, responses={201: s.SilenceSerializer})
    def create(self, request: Request) -> Response:
        """Silence alerts by their labels until a time."""
        params = _check_project(request, validated_body(s.SilenceInput, request))
        silence = alerts.create_silence(**params, by=signed_in_user(request))
        return Response(s.SilenceSerializer(silence).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.SilencePreviewInput, responses=s.SilencePreview)
    @action(detail=False, methods=["post"])
    def preview(self, request: Request) -> Response:
        """Alerts that the silence would match now; nothing is stored."""
        params = _check_project(request, validated_body(s.SilencePreviewInput, request))
        candidates = visible(actor(request), alerts.open_alerts())
        matching = alerts.matching_alerts(params["matchers"], project=params.get("project"), candidates=candidates)
        return Response({"alerts": s.AlertSerializer(matching, many=True).data})


def _check_project(request: Request, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters; PermissionDenied for a silence of all projects by an actor without the role in all of them."""
    role = needed_role_of(request)
    if params.get("project") is None and (role is None or not actor(request).may(role, None)):
        raise PermissionDenied("Name a project: you may not silence alerts of all projects.")
    return params
