"""The hit-rate ladder of a pool's task groups, bin by bin, and what its replay needs to go on."""

from django.db import models

from controlplane.models import Pool


def _tokens() -> "models.FloatField[float, float]":
    return models.FloatField(default=0.0)


def _squares() -> "models.FloatField[float, float]":
    return models.FloatField(default=0.0, db_default=0.0)


class LadderBin(models.Model):
    """Five minutes of one task group: additions, so that bins and groups add up. Terms as in ``telemetry.lab.ladder``.

    A bin of late is written anew until its time is settled; one whose decisions came much later, once more.
    """

    pk = models.CompositePrimaryKey("at", "pool_id", "group")
    at = models.DateTimeField()  # its start
    pool = models.ForeignKey(Pool, models.CASCADE, db_index=False, related_name="+")
    group = models.TextField()  # "": requests of no task group
    requests = models.IntegerField(default=0)
    prompt_tokens = _tokens()
    reachable = _tokens()
    capacity = _tokens()
    split = _tokens()
    best = _tokens()
    predicted = _tokens()
    doubt = _tokens()
    reported_requests = models.IntegerField(default=0)
    reported_tokens = _tokens()
    delivered = _tokens()
    prompt_squares = _squares()  # sums over requests; the variance of ``reachable`` follows from these three
    reachable_squares = _squares()
    reachable_products = _squares()
    sample_ratio = models.FloatField()  # part of the blocks that was replayed
    reason = models.CharField(max_length=200, blank=True)  # why all that needs the caches' sizes is unknown

    def __str__(self) -> str:
        return f"{self.pool_id}/{self.group} at {self.at:%F %T}"


class ReplayState(models.Model):
    """A pool's replay as it stood when a bin began, or after the newest settled minute: where to go on, or back to."""

    pool = models.ForeignKey(Pool, models.CASCADE, related_name="replay_states")
    at = models.DateTimeField()  # up to which decisions are replayed
    decisions = models.IntegerField(null=True)  # that settled minutes of the bin had; None: none is, or no bin began
    state = models.BinaryField(editable=False)  # telemetry.lab.state reads it

    class Meta:
        ordering = ("at",)
        constraints = (models.UniqueConstraint(fields=["pool", "at"], name="replay_state_unique"),)

    def __str__(self) -> str:
        return f"{self.pool_id} at {self.at:%F %T}"


class CapacityCurve(models.Model):
    """Hit rate against room, of a pool's latest decisions: what more memory, or a shared tier, would bring."""

    pool = models.OneToOneField(Pool, models.CASCADE, related_name="capacity_curve")
    at = models.DateTimeField()
    since = models.DateTimeField(null=True)  # of the first request counted
    requests = models.IntegerField(default=0)
    sample_ratio = models.FloatField(default=1.0)
    room_tokens = models.BigIntegerField(null=True)  # of a replica, on average, at the multiple 1
    replicas = models.IntegerField(default=0)
    points = models.JSONField(default=list)  # [{"multiple", "one", "split", "shared"}], ascending
    reason = models.CharField(max_length=200, blank=True)  # why there are none

    def __str__(self) -> str:
        return f"{self.pool_id} at {self.at:%F %T}"
