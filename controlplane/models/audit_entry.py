"""Who changed what, from where, and why: for good."""

from django.db import models

# What an entry says, and its digest covers.
SAID = (
    "number",
    "at",
    "kind",
    "actor",
    "token",
    "address",
    "request_id",
    "project",
    "pool",
    "summary",
    "reason",
    "before",
    "after",
    "previous",
)


class AuditEntry(models.Model):
    """One change. Rows are only added: a trigger refuses everything else (migration 0003), and each holds the digest
    of the one before it, so that a row that was taken away or altered behind the trigger's back is found.

    It refers to no other row, because it outlives them all.
    """

    number = models.BigIntegerField(primary_key=True)  # 1, 2, 3 ... without a gap
    at = models.DateTimeField()
    kind = models.CharField(max_length=32)  # an EventKind
    actor = models.CharField(max_length=150, blank=True)  # a user's name; "" where the system acted by itself
    token = models.CharField(max_length=16, blank=True)  # the key_id of the API token that was used
    address = models.CharField(max_length=45, blank=True)  # where the request came from
    request_id = models.CharField(max_length=64, blank=True)
    project = models.CharField(max_length=30, blank=True)
    pool = models.CharField(max_length=30, blank=True)
    summary = models.CharField(max_length=500)
    reason = models.CharField(max_length=500, blank=True)  # in the words of whoever did it
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    previous = models.CharField(max_length=64)  # the digest of the entry before; zeros before the first
    digest = models.CharField(max_length=64)  # SHA-256, hex, of everything above

    class Meta:
        ordering = ("-number",)
        indexes = (
            models.Index(fields=["actor", "-number"], name="audit_actor"),
            models.Index(fields=["kind", "-number"], name="audit_kind"),
        )

    def __str__(self) -> str:
        return f"{self.number}: {self.summary}"
