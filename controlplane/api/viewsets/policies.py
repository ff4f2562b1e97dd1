"""Doors to policies, and to the strategies that they may name."""

from __future__ import annotations

from dataclasses import asdict

from django.db.models import Prefetch
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.exchange import Exchange
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import policies as s
from controlplane.api.serializers.rollouts import RolloutSerializer
from controlplane.errors import NotADraftError
from controlplane.models import PolicyRevision, RevisionState, RoutingPolicy
from controlplane.services.policies import lifecycle as policies
from controlplane.services.policies.comparisons import (
    effects_of_settings,
    present_fleet,
    warnings_of_settings,
)
from controlplane.services.policies.revisions import revert_policy
from controlplane.services.policies.settings import diff_settings, policy_catalogue
from controlplane.services.rollouts.plans import make_plan

from .doors import NAME, Door, parsed

CURRENT = PolicyRevision.objects.filter(state__in=(RevisionState.LIVE, RevisionState.TRIAL, RevisionState.DRAFT))


class PolicyViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[RoutingPolicy]):
    """Routing policies. What is live changes only by publishing the draft."""

    queryset = RoutingPolicy.objects.select_related("pool", "group").prefetch_related(
        Prefetch("revisions", CURRENT.select_related("policy", "author"))
    )
    serializer_class = s.PolicySerializer
    lookup_field = "name"
    lookup_value_regex = NAME
    conditional_actions = ("publish", "revert")
    http_method_names = (*Door.http_method_names, "put")

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
        live, draft, fleet = policy.live(), self._draft(policy), present_fleet()
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
