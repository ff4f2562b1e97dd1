"""The sign of life that we give to others."""

from django.db import models


class Heartbeat(models.Model):
    """Somebody outside who is told every while that all is well, and who calls when that stops. One row at most."""

    sealed = models.BinaryField(editable=False)  # the URL, encrypted: it is a secret as a whole (S13)
    every_s = models.PositiveIntegerField(default=60)
    due_at = models.DateTimeField()  # the next one
    sent_at = models.DateTimeField(null=True, editable=False)  # the last that arrived
    failed_at = models.DateTimeField(null=True, editable=False)  # the last that did not
    error = models.CharField(max_length=200, blank=True, editable=False)  # of that one
    withheld = models.CharField(max_length=300, blank=True, editable=False)  # why the last one was not sent; "": it was

    class Meta:
        constraints = (models.CheckConstraint(condition=models.Q(pk=1), name="heartbeat_one_row"),)

    def __str__(self) -> str:
        return f"every {self.every_s} s"
