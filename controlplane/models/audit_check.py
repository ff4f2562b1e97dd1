"""What the nightly look at the audit log found."""

from django.db import models


class AuditCheck(models.Model):
    """One walk along the audit log's chain. The newest digest is noted, so that the next walk finds it unless somebody
    wrote the whole rest of the chain anew.
    """

    at = models.DateTimeField()
    entries = models.BigIntegerField()  # that were whole
    digest = models.CharField(max_length=64)  # of the last of them
    fault = models.CharField(max_length=500, blank=True)  # "": none; else the first entry that is not right

    class Meta:
        ordering = ("-at", "-pk")
        indexes = (models.Index(fields=["-at"], name="audit_check_at"),)

    def __str__(self) -> str:
        return self.fault or f"{self.entries} entries, whole"
