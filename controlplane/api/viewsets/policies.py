"""Viewsets of policies, revisions, rollouts, configurations and the catalogue of strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import ClassVar

from django.db.models import Prefetch, QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.auth import signed_in_user
from controlplane.api.filters import RevisionFilter, RolloutFilter
from controlplane.api.pagination import newest_first
from controlplane.api.serializers import policies as policy_serializers
from controlplane.api.serializers.policies import RolloutSerializer
from controlplane.api.views import TransactionalView
from controlplane.api.viewsets.base import (
    NAME,
    NUMBER,
    BaseViewSet,
    CreateMixin,
    DestroyMixin,
    ReadViewSet,
    validated_body,
)
from controlplane.errors import InvalidError, NotADraftError
from controlplane.models import CURRENT_REVISIONS, ConfigSnapshot, PolicyRevision, Rollout, RoutingPolicy
from controlplane.services.impact import (
    current_fleet,
    effects_of_configurations,
    effects_of_revisions,
    effects_of_settings,
    warnings_of_settings,
)
from controlplane.services.policies import lifecycle as policies
from controlplane.services.policies import rollouts
from controlplane.services.policies.publish_checks import finding_of
from controlplane.services.policies.rollout_plans import make_plan
from controlplane.services.policies.settings import diff_settings, policy_catalogue

CURRENT = PolicyRevision.objects.filter(state__in=CURRENT_REVISIONS)


class PolicyViewSet(CreateMixin, DestroyMixin, ReadViewSet[RoutingPolicy]):
    """Routing policies. The active revision changes only by publishing the draft."""

    queryset = RoutingPolicy.objects.select_related("pool", "group").prefetch_related(
        Prefetch("revisions", CURRENT.select_related("policy", "author"))
    )
    serializer_class = policy_serializers.PolicySerializer
    create_input = policy_serializers.PolicyInput
    create_row = staticmethod(lambda group, by: policies.create_policy(group.pool, group, by=by))
    remove_row = staticmethod(policies.remove_policy)
    lookup_field, lookup_value_regex = "name", NAME
    conditional_actions = ("publish", "revert")
    http_method_names = (*BaseViewSet.http_method_names, "put")
    descriptions: ClassVar = {
        "create": "Create a policy for a task group; it takes effect once its draft is published.",
        "destroy": "Remove a task group's own policy; 409 for a pool's.",
    }

    @extend_schema(request=policy_serializers.DraftInput, responses=policy_serializers.RevisionSerializer)
    @action(detail=True, methods=["put"])
    def draft(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Write the draft, replacing the former one; 409 if ``based_on`` is no longer active."""
        fields = validated_body(policy_serializers.DraftInput, request)
        draft = policies.save_draft(self.get_object(), **fields, by=signed_in_user(request))
        return Response(policy_serializers.RevisionSerializer(draft).data)

    @extend_schema(responses={204: None})
    @draft.mapping.delete
    def discard(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Discard the draft; 409 if there is none."""
        policies.discard_draft(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(responses=policy_serializers.DiffSerializer)
    @action(detail=True, methods=["get"])
    def diff(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """What publishing the draft would change, and its effects; 409 if there is no draft."""
        policy = self.get_object()
        live, draft, fleet = policy.live(), _draft_of(policy), current_fleet()
        before = live.settings if live else None
        diff = {
            "before": live.number if live else None,
            "after": draft.number,
            "digest": draft.digest,
            "changes": diff_settings(before, draft.settings),
            "effects": effects_of_settings(policy, before, draft.settings, fleet=fleet),
            "warnings": warnings_of_settings(policy, draft.settings, fleet=fleet),
            "finding": finding_of(draft),
        }
        return Response(policy_serializers.DiffSerializer(diff).data)

    @extend_schema(request=policy_serializers.PublishInput, responses={202: RolloutSerializer})
    @action(detail=True, methods=["post"])
    def publish(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Publish the draft; 202 with the rollout, 409 if there is no draft, it was edited since, the pool requires a
        prediction that it does not have, or an alert or an analysis named these settings.
        """
        policy, fields = self.get_object(), validated_body(policy_serializers.PublishInput, request)
        rollout = policies.publish_revision(
            _draft_of(policy).pk,
            by=signed_in_user(request),
            reason=fields.get("reason", ""),
            expected_digest=fields.get("digest"),
            plan=make_plan(policy, **{key: fields[key] for key in ("plan", "stages", "guard") if key in fields}),
            override_reason=fields.get("override_reason", ""),
            confirm_faulted=fields.get("confirm_faulted", False),
        )
        return Response(RolloutSerializer(rollout).data, status.HTTP_202_ACCEPTED)

    @extend_schema(request=policy_serializers.RevertInput, responses={202: RolloutSerializer})
    @action(detail=True, methods=["post"])
    def revert(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Publish a new revision with the settings of an earlier one; 202 with the rollout, 409 if they are active or
        faulty.
        """
        policy, fields = self.get_object(), validated_body(policy_serializers.RevertInput, request)
        rollout = policies.revert_policy(
            policy,
            fields["revision"],
            by=signed_in_user(request),
            reason=fields.get("reason", ""),
            expected_live=fields.get("live"),
            confirm_faulted=fields.get("confirm_faulted", False),
        )
        return Response(RolloutSerializer(rollout).data, status.HTTP_202_ACCEPTED)


def _draft_of(policy: RoutingPolicy) -> PolicyRevision:
    draft = policy.draft()
    if draft is None:
        raise NotADraftError(f"Policy {policy.name} has no draft.")
    return draft


class CatalogueView(TransactionalView):
    """Every strategy that routers know, with its settings: unit, range, default and meaning."""

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request) -> Response:  # noqa: ARG002 - the same for everybody
        """The catalogue."""
        return Response({"strategies": [asdict(strategy) for strategy in policy_catalogue()]})


def _compare_schema(noun: str, responses: type[serializers.Serializer[object]]) -> Callable[..., object]:
    parameters = [
        OpenApiParameter("from", int, required=True, description=f"The {noun} to replace."),
        OpenApiParameter("to", int, required=True, description=f"The {noun} that replaces it."),
    ]
    return extend_schema(parameters=parameters, responses=responses, filters=False)


class RevisionViewSet(ReadViewSet[PolicyRevision]):
    """Policy revisions. Read-only: a change is a new draft."""

    queryset = PolicyRevision.objects.select_related("policy", "author")
    serializer_class = policy_serializers.RevisionSerializer
    filterset_class = RevisionFilter
    pagination_class = newest_first("-id")
    lookup_value_regex = NUMBER

    @_compare_schema("id of the revision", policy_serializers.ComparisonSerializer)
    @action(detail=False, methods=["get"], pagination_class=None)
    def compare(self, request: Request) -> Response:
        """What one revision of a policy changes relative to another in the present fleet; 422 for two policies."""
        query = policy_serializers.RevisionsQuery(data=request.query_params, context={"request": request})
        query.is_valid(raise_exception=True)
        before, after = query.validated_data["from"], query.validated_data["to"]
        if before.policy_id != after.policy_id:
            raise InvalidError("$.to", f"a revision of {after.policy.name}; the other one is of {before.policy.name}")
        comparison = {
            "before": before.number,
            "after": after.number,
            "changes": diff_settings(before.settings, after.settings),
            "effects": effects_of_revisions(before, after),
        }
        return Response(policy_serializers.ComparisonSerializer(comparison).data)


TRANSITION = extend_schema(
    request=policy_serializers.TransitionInput, responses=policy_serializers.RolloutDetailSerializer
)


class RolloutViewSet(ReadViewSet[Rollout]):
    """Rollouts. Publishing starts one; each transition is an action, 409 where the state does not allow it."""

    queryset = Rollout.objects.select_related("revision__policy__pool", "snapshot", "started_by", "approved_by").defer(
        "past_readings", "snapshot__encrypted", "snapshot__document"
    )
    filterset_class = RolloutFilter
    pagination_class = newest_first("-started_at", "-id")
    lookup_value_regex = NUMBER

    def get_serializer_class(self) -> type[serializers.BaseSerializer[Rollout]]:
        """Steps and routers only for a single rollout."""
        return (
            policy_serializers.RolloutSerializer
            if self.action == "list"
            else policy_serializers.RolloutDetailSerializer
        )

    @TRANSITION
    @action(detail=True, methods=["post"])
    def pause(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Stay at the current stage; the canary analysis continues."""
        return self._transition(request, rollouts.pause_rollout)

    @TRANSITION
    @action(detail=True, methods=["post"])
    def resume(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Resume a paused rollout."""
        return self._transition(request, rollouts.resume_rollout)

    @TRANSITION
    @action(detail=True, methods=["post"])
    def promote(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Promote to the next stage now, regardless of the analysis of the current stage."""
        return self._transition(request, rollouts.promote_rollout)

    @TRANSITION
    @action(detail=True, methods=["post"])
    def abort(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Abort: the active revision places all requests again, at once."""
        return self._transition(request, rollouts.abort_rollout)

    @TRANSITION
    @action(detail=True, methods=["post"])
    def approve(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Approve the start of a rollout; 403 for its publisher."""
        return self._transition(request, rollouts.approve_rollout)

    def _transition(self, request: Request, service: Callable[..., Rollout]) -> Response:
        reason = validated_body(policy_serializers.TransitionInput, request).get("reason", "")
        rollout = service(self.get_object().pk, by=signed_in_user(request), reason=reason)
        return Response(self.get_serializer(rollout).data)


class ConfigurationViewSet(ReadViewSet[ConfigSnapshot]):
    """Every configuration of the routers, newest first. Read-only: each change of the fleet creates one."""

    queryset = ConfigSnapshot.objects.select_related("created_by").defer("encrypted")
    serializer_class = policy_serializers.ConfigurationSerializer
    pagination_class = newest_first("-number")
    lookup_field, lookup_value_regex = "number", NUMBER

    def get_queryset(self) -> QuerySet[ConfigSnapshot]:
        """Documents, which are as large as the fleet, only for a single configuration."""
        rows = super().get_queryset()
        return rows if self.action == "retrieve" else rows.defer("encrypted", "document")

    def get_serializer_class(self) -> type[serializers.BaseSerializer[ConfigSnapshot]]:
        return (
            policy_serializers.WholeConfigurationSerializer
            if self.action == "retrieve"
            else policy_serializers.ConfigurationSerializer
        )

    @_compare_schema("number of the configuration", policy_serializers.ConfigurationsCompared)
    @action(detail=False, methods=["get"], pagination_class=None)
    def compare(self, request: Request) -> Response:
        """The effects of one configuration relative to another; 409 where one can no longer be read."""
        query = policy_serializers.ConfigurationsQuery(data=request.query_params)
        query.is_valid(raise_exception=True)
        before, after = query.validated_data["from"], query.validated_data["to"]
        comparison = {
            "before": before.number,
            "after": after.number,
            "effects": effects_of_configurations(before, after),
        }
        return Response(policy_serializers.ConfigurationsCompared(comparison).data)
