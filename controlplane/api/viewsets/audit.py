"""Doors to the audit log."""

from __future__ import annotations

from rest_framework import mixins

from controlplane.api.filters import AuditFilter
from controlplane.api.pagination import AuditPages
from controlplane.api.serializers import audit as s
from controlplane.models import AuditEntry

from .doors import NUMBER, Door


class AuditViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[AuditEntry]):
    """The audit log, newest first; for admins of everything."""

    queryset = AuditEntry.objects.all()
    serializer_class = s.AuditSerializer
    filterset_class = AuditFilter
    pagination_class = AuditPages
    lookup_value_regex = NUMBER
