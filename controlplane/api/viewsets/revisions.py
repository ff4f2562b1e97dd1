"""Doors to revisions of policies."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.filters import RevisionFilter
from controlplane.api.pagination import RevisionPages
from controlplane.api.serializers import policies as s
from controlplane.errors import InvalidError
from controlplane.models import PolicyRevision
from controlplane.services.policies.comparisons import (
    effects_of_revisions,
)
from controlplane.services.policies.settings import diff_settings

from .doors import NUMBER, Door

COMPARED = (("from", "A revision's id: what would be replaced."), ("to", "The id of another of the same policy."))


class RevisionViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[PolicyRevision]):
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
