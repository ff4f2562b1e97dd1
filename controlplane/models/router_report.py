"""What routers told, by the names that they gave it."""

from django.db import models
from django.db.models import UniqueConstraint

from .router import Router


class RouterReport(models.Model):
    """One event of a router that was taken into the timeline. A router tells again what it does not know to be taken;
    the constraint makes that once.
    """

    router = models.ForeignKey(Router, models.CASCADE, related_name="reports")
    boot = models.CharField(max_length=64)  # the router's life
    seq = models.PositiveBigIntegerField()  # 1, 2, 3 ... within it
    taken_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("pk",)
        constraints = (UniqueConstraint(fields=("router", "boot", "seq"), name="router_report_once"),)

    def __str__(self) -> str:
        return f"{self.router_id} {self.boot} {self.seq}"
