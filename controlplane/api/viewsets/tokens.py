"""Doors to tokens."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import tokens as s
from controlplane.models import ApiToken
from controlplane.services.access.tokens import create_token, revoke_token

from .doors import NUMBER, Door, parsed


class TokenViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[ApiToken]):
    """Tokens for scripts; for administrators."""

    queryset = ApiToken.objects.select_related("user")
    serializer_class = s.TokenSerializer
    lookup_value_regex = NUMBER
    observed = ("last_used_at",)
    shown_once = ("token",)

    @extend_schema(request=s.TokenInput, responses={201: s.CreatedTokenSerializer})
    def create(self, request: Request) -> Response:
        """Create a token that acts for you; its text is in this answer and nowhere else."""
        user = signed_in_user(request)
        token, text = create_token(user, **parsed(s.TokenInput, request), by=user)
        answer = {**s.TokenSerializer(token).data, "token": text}
        return Response(answer, status.HTTP_201_CREATED, headers={"Cache-Control": "no-store"})

    def destroy(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Revoke a token now; 409 if it was revoked before."""
        revoke_token(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
