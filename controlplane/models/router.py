"""Our proxy process, as it last reported itself."""

from datetime import datetime

from django.db import models

from .names import LONG_NAME, long_name, well_formed


class Router(models.Model):
    """A router that announced itself. What it should run is the newest ConfigSnapshot; what it runs stands here."""

    name = long_name(unique=True)
    admin_url = models.CharField(max_length=2048)  # where configuration is pushed to
    data_url = models.CharField(max_length=2048, blank=True)  # where clients reach it
    boot = models.CharField(max_length=64)  # changes with each start of the process
    version = models.CharField(max_length=64, blank=True)
    first_seen_at = models.DateTimeField(auto_now_add=True)
    last_seen_at = models.DateTimeField()  # it announced itself, or answered us
    lost_at = models.DateTimeField(null=True, blank=True)  # when its silence was noticed; None while it is present

    warming = models.JSONField(default=dict, blank=True)  # by replica that it warms up: prefixes and tokens, and done

    running_number = models.PositiveBigIntegerField(null=True, blank=True)  # a ConfigSnapshot's; None: nothing yet
    running_sha256 = models.CharField(max_length=64, blank=True)
    # What it says of the signature of what it runs: "verified", "expired", "unsigned" or "unchecked"; "": nothing yet.
    signature_state = models.CharField(max_length=20, blank=True, default="", db_default="")
    signature_key = models.CharField(max_length=16, blank=True, default="", db_default="")  # id of the public key
    signature_expires_at = models.DateTimeField(null=True, blank=True)
    last_ack_at = models.DateTimeField(null=True, blank=True)
    last_nack = models.JSONField(null=True, blank=True)  # {"revision", "path", "reason", "at"} until the next ACK
    last_error = models.CharField(max_length=500, blank=True)  # why the last push did not arrive; "" when it did

    pushed_number = models.PositiveBigIntegerField(null=True, blank=True)  # what was last sent, or is on its way
    push_after = models.DateTimeField(null=True, blank=True)  # that number is not sent again before this moment
    push_failures = models.PositiveIntegerField(default=0)  # in a row

    class Meta:
        ordering = ("name",)
        constraints = (well_formed("router_name_form", LONG_NAME),)

    def __str__(self) -> str:
        return self.name

    def runs(self, number: int, sha256: str) -> bool:
        """Whether it runs exactly this configuration, as far as it told us."""
        return self.running_number == number and self.running_sha256 == sha256

    def silent_for_s(self, now: datetime) -> float:
        """Seconds since it was last heard of."""
        return (now - self.last_seen_at).total_seconds()
