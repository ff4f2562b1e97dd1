"""Doors to rollouts."""

from __future__ import annotations

from collections.abc import Callable

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.filters import RolloutFilter
from controlplane.api.pagination import RolloutPages
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import rollouts as s
from controlplane.models import Rollout
from controlplane.services.rollouts import steering as rollouts

from .doors import NUMBER, Door, parsed

MOVED = extend_schema(request=s.MoveInput, responses=s.RolloutDetailSerializer)


class RolloutViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Rollout]):
    """Rollouts. Publishing starts one; each of its moves is an action, 409 where its state has no such move."""

    queryset = Rollout.objects.select_related("revision__policy__pool", "snapshot", "started_by", "approved_by").defer(
        "snapshot__sealed", "snapshot__document"
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
