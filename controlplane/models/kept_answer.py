"""Answers that are given again when a request is repeated."""

from django.db import models
from django.db.models import UniqueConstraint


class KeptAnswer(models.Model):
    """What was answered to a ``POST`` with an ``Idempotency-Key``, written in the transaction of what it changed.

    So there is an answer exactly where there was a change, whatever crashed in between.
    """

    owner = models.CharField(max_length=40)  # token:<id> or user:<id>: nobody meets another's keys
    key = models.CharField(max_length=255)  # as the client chose it
    fingerprint = models.CharField(max_length=64)  # keyed hash of address and body: the same key, the same request
    status = models.PositiveSmallIntegerField()
    headers = models.JSONField()
    sealed = models.BinaryField()  # the body; it may hold a secret that is shown this once
    created_at = models.DateTimeField(auto_now_add=True, db_index=True)

    class Meta:
        constraints = (UniqueConstraint(fields=["owner", "key"], name="kept_answer_key_unique"),)

    def __str__(self) -> str:
        return f"answer {self.status} to {self.owner}"
