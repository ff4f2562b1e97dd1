"""The door to the whole fleet as one document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api import preconditions
from controlplane.api.bundle import export_bundle
from controlplane.api.bundle_apply import Applied, apply_bundle
from controlplane.api.exceptions import ChangedMeanwhile, PreconditionRequired
from controlplane.api.middleware import Exchange, switch
from controlplane.api.permissions import actor
from controlplane.api.serializers import config as s
from controlplane.api.serializers.policies import RolloutSerializer

PRUNE = OpenApiParameter("prune", bool, description="Remove what the bundle's lists do not name.")
DRAFT = OpenApiParameter("draft", bool, description="Draft policies instead of publishing them.")


class ConfigView(Exchange):
    """The fleet as one document: export it, edit it, look at the plan, apply it."""

    max_body_bytes = 16 * 1_048_576
    # What the OpenAPI document reads of a door: one object, of whose version every change is.
    detail, action, conditional_actions = True, "config", ()

    def perform(self, request: Request) -> Response:
        """Let the method do its work, unless the fleet is no longer what the client looked at."""
        if request.method == "PUT":
            self._check_version(request)
        answer = super().perform(request)
        answer["ETag"] = preconditions.tag_of(export_bundle(actor(request)) if request.method == "PUT" else answer.data)
        if request.method != "PUT" and preconditions.is_known(request, answer["ETag"]):
            return Response(status=status.HTTP_304_NOT_MODIFIED, headers={"ETag": answer["ETag"]})
        return answer

    def _check_version(self, request: Request) -> None:
        if not preconditions.is_asked_for(request):
            raise PreconditionRequired
        now = export_bundle(actor(request))
        if not preconditions.still_matches(request, preconditions.tag_of(now)):
            raise ChangedMeanwhile(etag=preconditions.tag_of(now), current=now)

    @extend_schema(responses=s.BundleSerializer)
    def get(self, request: Request) -> Response:
        """Everything that you may see, in a stable order; without secrets."""
        return Response(export_bundle(actor(request)))

    @extend_schema(request=s.BundleSerializer, responses=s.AppliedSerializer, parameters=[PRUNE, DRAFT])
    def put(self, request: Request) -> Response:
        """Make the fleet what the bundle says: all of it, or nothing."""
        bundle = s.check_shape(request.data)
        how = {"prune": switch(request, "prune"), "draft": switch(request, "draft")}
        return Response(_answer(apply_bundle(bundle, request, **how, reason=str(bundle.get("reason", ""))[:500])))


def _answer(applied: Applied) -> dict[str, Any]:
    rollouts = RolloutSerializer(applied.rollouts, many=True).data
    return {"actions": [asdict(action) for action in applied.actions], "rollouts": rollouts}
