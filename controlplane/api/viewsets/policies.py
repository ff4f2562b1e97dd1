"""Doors to policies, and to the strategies that they may name.

Doors to revisions of policies.

Doors to rollouts.

Doors to configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from django.db.models import Prefetch, QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.filters import RevisionFilter, RolloutFilter
from controlplane.api.middleware import Exchange
from controlplane.api.pagination import ConfigurationPages, RevisionPages, RolloutPages
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import policies as s
from controlplane.api.serializers.policies import RolloutSerializer
from controlplane.api.viewsets.base import NAME, NUMBER, BaseViewSet, parsed
from controlplane.errors import InvalidError, NotADraftError
from controlplane.models import ConfigSnapshot, PolicyRevision, RevisionState, Rollout, RoutingPolicy
from controlplane.services.impact.compare import (
    current_fleet,
    effects_of_configurations,
    effects_of_revisions,
    effects_of_settings,
    warnings_of_settings,
)
from controlplane.services.policies import lifecycle as policies
from controlplane.services.policies import rollouts
from controlplane.services.policies.lifecycle import revert_policy
from controlplane.services.policies.rollout_plans import make_plan
from controlplane.services.policies.settings import diff_settings, policy_catalogue

CURRENT = PolicyRevision.objects.filter(state__in=(RevisionState.LIVE, RevisionState.CANARY, RevisionState.DRAFT))


class PolicyViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[RoutingPolicy]):
    """Routing policies. What is live changes only by publishing the draft."""

    queryset = RoutingPolicy.objects.select_related("pool", "group").prefetch_related(
        Prefetch("revisions", CURRENT.select_related("policy", "author"))
    )
    serializer_class = s.PolicySerializer
    lookup_field = "name"
    lookup_value_regex = NAME
    conditional_actions = ("publish", "revert")
    http_method_names = (*BaseViewSet.http_method_names, "put")

    @extend_schema(request=s.PolicyInput, responses={201: s.PolicySerializer})
    def create(self, request: Request) -> Response:
        """Give a task group a policy of its own; it takes over once a draft of it is published."""
        group = parsed(s.PolicyInput, request)["group"]
        policy = policies.create_policy(group.pool, group)
        return Response(s.PolicySerializer(policy).data, status.HTTP_201_CREATED)

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Take a task group's own policy away; 409 for a pool's."""
        policies.remove_policy(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=s.DraftInput, responses=s.RevisionSerializer)
    @action(detail=True, methods=["put"])
    def draft(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Write the draft, over the former one; 409 if ``based_on`` is no longer live."""
        draft = policies.save_draft(self.get_object(), **parsed(s.DraftInput, request), by=signed_in_user(request))
        return Response(s.RevisionSerializer(draft).data)

    @extend_schema(responses={204: None})
    @draft.mapping.delete
    def discard(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Throw the draft away; 409 if there is none."""
        policies.discard_draft(self.get_object())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(responses=s.DiffSerializer)
    @action(detail=True, methods=["get"])
    def diff(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """What publishing the draft would change, and what that does for whom; 409 if there is no draft."""
        policy = self.get_object()
        live, draft, fleet = policy.live(), self._draft(policy), current_fleet()
        answer = {
            "before": live.number if live else None,
            "after": draft.number,
            "digest": draft.digest,
            "changes": diff_settings(live.settings if live else None, draft.settings),
            "effects": effects_of_settings(policy, live.settings if live else None, draft.settings, fleet=fleet),
            "warnings": warnings_of_settings(policy, draft.settings, fleet=fleet),
        }
        return Response(s.DiffSerializer(answer).data)

    @extend_schema(request=s.PublishInput, responses={202: RolloutSerializer})
    @action(detail=True, methods=["post"])
    def publish(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Publish the draft; 202 with the rollout to watch, 409 if there is no draft or it was edited since."""
        policy, asked = self.get_object(), parsed(s.PublishInput, request)
        rollout = policies.publish_revision(
            self._draft(policy).pk,
            by=signed_in_user(request),
            reason=asked.get("reason", ""),
            expected_digest=asked.get("digest"),
            plan=make_plan(policy, **{name: asked[name] for name in ("plan", "stages", "guard") if name in asked}),
        )
        return Response(RolloutSerializer(rollout).data, status.HTTP_202_ACCEPTED)

    @extend_schema(request=s.RevertInput, responses={202: RolloutSerializer})
    @action(detail=True, methods=["post"])
    def revert(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Publish a new revision with the settings of an earlier one; 202 with the rollout, 409 if they run."""
        policy, asked = self.get_object(), parsed(s.RevertInput, request)
        rollout = revert_policy(
            policy,
            asked["revision"],
            by=signed_in_user(request),
            reason=asked.get("reason", ""),
            expected_live=asked.get("live"),
        )
        return Response(RolloutSerializer(rollout).data, status.HTTP_202_ACCEPTED)

    def _draft(self, policy: RoutingPolicy) -> PolicyRevision:
        draft = policy.draft()
        if draft is None:
            raise NotADraftError(f"Policy {policy.name} has no draft.")
        return draft


class CatalogueView(Exchange):
    """Every strategy that routers know, with its settings: unit, range, default and meaning."""

    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request) -> Response:  # noqa: ARG002 - the same for everybody
        """The catalogue."""
        return Response({"strategies": [asdict(strategy) for strategy in policy_catalogue()]})


COMPARED = (("from", "A revision's id: what would be replaced."), ("to", "The id of another of the same policy."))


class RevisionViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[PolicyRevision]):
    """Policy revisions. Read-only: a change is a new draft."""

    queryset = PolicyRevision.objects.select_related("policy", "author")
    serializer_class = s.RevisionSerializer
    filterset_class = RevisionFilter
    pagination_class = RevisionPages
    lookup_value_regex = NUMBER

    @extend_schema(
        parameters=[OpenApiParameter(name, int, required=True, description=text) for name, text in COMPARED],
        responses=s.ComparisonSerializer,
        filters=False,
    )
    @action(detail=False, methods=["get"], pagination_class=None)
    def compare(self, request: Request) -> Response:
        """What one revision of a policy does instead of another, in the fleet as it is now; 422 for two policies'."""
        asked = s.RevisionsAsked(data=request.query_params, context={"request": request})
        asked.is_valid(raise_exception=True)
        before, after = asked.validated_data["from"], asked.validated_data["to"]
        if before.policy_id != after.policy_id:
            raise InvalidError("$.to", f"a revision of {after.policy.name}; the other one is of {before.policy.name}")
        answer = {
            "before": before.number,
            "after": after.number,
            "changes": diff_settings(before.settings, after.settings),
            "effects": effects_of_revisions(before, after),
        }
        return Response(s.ComparisonSerializer(answer).data)


MOVED = extend_schema(request=s.MoveInput, responses=s.RolloutDetailSerializer)


class RolloutViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[Rollout]):
    """Rollouts. Publishing starts one; each of its moves is an action, 409 where its state has no such move."""

    queryset = Rollout.objects.select_related("revision__policy__pool", "snapshot", "started_by", "approved_by").defer(
        "snapshot__encrypted", "snapshot__document"
    )
    filterset_class = RolloutFilter
    pagination_class = RolloutPages
    lookup_value_regex = NUMBER
    tagged_in_lists = False
    observed = ("snapshot", "stage_converged_at", "readings", "readings_at", "routers")

    def get_serializer_class(self) -> type[serializers.BaseSerializer[Rollout]]:
        """Steps and routers of one rollout alone."""
        return s.RolloutSerializer if self.action == "list" else s.RolloutDetailSerializer

    @MOVED
    @action(detail=True, methods=["post"])
    def pause(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Widen no further for now; what is on trial stays so, and the guard still watches."""
        return self._moved(request, rollouts.pause_rollout)

    @MOVED
    @action(detail=True, methods=["post"])
    def resume(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Go on after a pause."""
        return self._moved(request, rollouts.resume_rollout)

    @MOVED
    @action(detail=True, methods=["post"])
    def promote(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Go to the next stage now, whatever was observed of this one."""
        return self._moved(request, rollouts.promote_rollout)

    @MOVED
    @action(detail=True, methods=["post"])
    def abort(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Withdraw the revision: the one in force places everything again, at once."""
        return self._moved(request, rollouts.abort_rollout)

    @MOVED
    @action(detail=True, methods=["post"])
    def approve(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Let what somebody else published begin; 403 for who published it."""
        return self._moved(request, rollouts.approve_rollout)

    def _moved(self, request: Request, move: Callable[..., Rollout]) -> Response:
        asked = parsed(s.MoveInput, request)
        rollout = move(self.get_object().pk, by=signed_in_user(request), reason=asked.get("reason", ""))
        return Response(self.get_serializer(rollout).data)


COMPARED_CONFIGURATIONS = (("from", "A configuration's number."), ("to", "Another's: what runs instead."))


class ConfigurationViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[ConfigSnapshot]):
    """Everything that routers were ever told to run, newest first. Read-only: each change of the fleet makes one."""

    queryset = ConfigSnapshot.objects.select_related("created_by").defer("encrypted")
    serializer_class = s.ConfigurationSerializer
    pagination_class = ConfigurationPages
    lookup_field = "number"
    lookup_value_regex = NUMBER

    def get_queryset(self) -> QuerySet[ConfigSnapshot]:
        """Without the documents, unless one is asked for."""
        rows = super().get_queryset()
        return rows if self.action == "retrieve" else rows.defer("encrypted", "document")

    def get_serializer_class(self) -> type[serializers.BaseSerializer[ConfigSnapshot]]:
        """The document, as large as the fleet, only where one is asked for."""
        return s.WholeConfigurationSerializer if self.action == "retrieve" else s.ConfigurationSerializer

    @extend_schema(
        parameters=[
            OpenApiParameter(name, int, required=True, description=text) for name, text in COMPARED_CONFIGURATIONS
        ],
        responses=s.ConfigurationsCompared,
        filters=False,
    )
    @action(detail=False, methods=["get"], pagination_class=None)
    def compare(self, request: Request) -> Response:
        """What one configuration does instead of another, for whom; 409 where one cannot be read any more."""
        asked = s.ConfigurationsAsked(data=request.query_params)
        asked.is_valid(raise_exception=True)
        before, after = asked.validated_data["from"], asked.validated_data["to"]
        answer: dict[str, Any] = {
            "before": before.number,
            "after": after.number,
            "effects": effects_of_configurations(before, after),
        }
        return Response(s.ConfigurationsCompared(answer).data)
