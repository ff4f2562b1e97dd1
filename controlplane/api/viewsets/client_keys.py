"""Doors to client keys."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.filters import ClientKeyFilter
from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import client_keys as s
from controlplane.models import ClientKey
from controlplane.services.fleet import client_keys

from .doors import NUMBER, Door, parsed


class ClientKeyViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[ClientKey]):
    """Keys that clients send to routers. Whether one is needed is a setting of the fleet."""

    queryset = ClientKey.objects.select_related("project", "created_by")
    serializer_class = s.ClientKeySerializer
    filterset_class = ClientKeyFilter
    lookup_value_regex = NUMBER
    shown_once = ("key",)

    @extend_schema(request=s.ClientKeyInput, responses={201: s.CreatedClientKeySerializer})
    def create(self, request: Request) -> Response:
        """Create a key; its text is in this answer and nowhere else."""
        key, text = client_keys.create_client_key(**parsed(s.ClientKeyInput, request), by=signed_in_user(request))
        answer = {**s.ClientKeySerializer(key).data, "key": text}
        return Response(answer, status.HTTP_201_CREATED, headers={"Cache-Control": "no-store"})

    @extend_schema(request=s.ClientKeyChange, responses=s.ClientKeySerializer)
    def partial_update(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what a key is good for; 409 for a revoked one."""
        changes = parsed(s.ClientKeyChange, request, partial=True)
        key = client_keys.update_client_key(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.ClientKeySerializer(key).data)

    def destroy(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Revoke a key; 409 if it was revoked before."""
        client_keys.revoke_client_key(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
