"""The audit log as JSON."""

from __future__ import annotations

from rest_framework import serializers

from controlplane.models import AuditEntry
from controlplane.models.audit_entry import SAID


class AuditSerializer(serializers.ModelSerializer[AuditEntry]):
    """One entry of the audit log; ``digest`` covers all the rest, ``previous`` is that of the entry before."""

    class Meta:
        model = AuditEntry
        fields = (*SAID, "digest")
