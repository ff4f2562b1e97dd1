"""Doors to projects."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.permissions import signed_in_user
from controlplane.api.serializers import projects as s
from controlplane.models import Project
from controlplane.services.access import projects

from .doors import NAME, Door, parsed


class ProjectViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Project]):
    """Projects: pools that the same people look after."""

    queryset = Project.objects.all()
    serializer_class = s.ProjectSerializer
    lookup_field = "name"
    lookup_value_regex = NAME

    @extend_schema(request=s.ProjectInput, responses={201: s.ProjectSerializer})
    def create(self, request: Request) -> Response:
        """Create a project; nobody but admins of everything sees it until they are given a role in it."""
        project = projects.create_project(**parsed(s.ProjectInput, request), by=signed_in_user(request))
        return Response(s.ProjectSerializer(project).data, status.HTTP_201_CREATED)

    @extend_schema(request=s.ProjectChange, responses=s.ProjectSerializer)
    def partial_update(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Change what is given."""
        changes = parsed(s.ProjectChange, request, partial=True)
        project = projects.update_project(self.get_object(), **changes, by=signed_in_user(request))
        return Response(s.ProjectSerializer(project).data)

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Remove a project with every role in it; 409 while it has pools."""
        projects.remove_project(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
