"""Doors to rollouts."""

from __future__ import annotations

from rest_framework import mixins

from controlplane.api.filters import RolloutFilter
from controlplane.api.pagination import RolloutPages
from controlplane.api.serializers import rollouts as s
from controlplane.models import Rollout

from .doors import NUMBER, Door


class RolloutViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Rollout]):
    """Rollouts. Read-only: publishing starts one."""

    queryset = Rollout.objects.select_related("revision__policy", "snapshot", "started_by").defer(
        "snapshot__sealed", "snapshot__document"
    )
    serializer_class = s.RolloutSerializer
    filterset_class = RolloutFilter
    pagination_class = RolloutPages
    lookup_value_regex = NUMBER
