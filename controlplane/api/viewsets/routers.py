"""Doors to routers, and the one that they use."""

from __future__ import annotations

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.authentication import RouterAuthentication
from controlplane.api.exchange import Exchange
from controlplane.api.permissions import IsRouter, signed_in_user
from controlplane.api.serializers import routers as s
from controlplane.models import Router
from controlplane.push.client import Signature
from controlplane.push.explain import ask_decision
from controlplane.services import routers
from controlplane.services.snapshots import newest_snapshot

from .doors import NAME, Door, heard, parsed


class RouterViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Router]):
    """Routers, each with what it runs and what it should run. They announce themselves; one is only ever removed."""

    queryset = Router.objects.all()
    serializer_class = s.RouterSerializer
    lookup_field = "name"
    lookup_value_regex = NAME
    observed = s.OBSERVED

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Forget a router that is gone for good; 409 while it is heard of."""
        routers.remove_router(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def get_serializer_context(self) -> dict[str, Any]:
        """The newest snapshot, asked for once."""
        return {**super().get_serializer_context(), "desired": newest_snapshot()}

    @extend_schema(request=s.ExplainInput, responses=OpenApiTypes.OBJECT)
    @action(detail=True, methods=["post"])
    def explain(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Where it would place a request now, among which candidates, and why. Nothing is sent to a replica."""
        return Response(ask_decision(self.get_object(), parsed(s.ExplainInput, request)))


class AnnounceView(Exchange):
    """Where routers report themselves, by the token that they share with the control plane."""

    authentication_classes = (RouterAuthentication,)
    permission_classes = (IsRouter,)

    @extend_schema(request=s.AnnounceInput, responses=s.AnnouncedSerializer)
    def post(self, request: Request) -> Response:
        """Note a heartbeat; the answer is the number to run, which is then pushed to the admin port.

        What a newer router says besides is passed over: routers may be upgraded first.
        """
        told = heard(s.AnnounceInput, request)
        said = told.pop("signature", None)
        routers.announce(**told, signature=Signature(**said) if said else None)
        desired = newest_snapshot()
        taken = len(told.get("events", ()))
        return Response({"desired_revision": desired.number if desired else None, "events_taken": taken})
