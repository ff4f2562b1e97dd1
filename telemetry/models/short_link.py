"""Short addresses of views."""

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, Q

LONGEST = 2000  # characters of a view's address; PostgreSQL's index takes 2,700 bytes


class ShortLink(models.Model):
    """A page of ours with all of its state, and the code that leads there. The same view has one code."""

    code = models.CharField(max_length=16, unique=True)
    view = models.CharField(max_length=LONGEST, unique=True)  # path and query, of printable ASCII
    made_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    made_at = models.DateTimeField()
    used_at = models.DateTimeField(db_index=True)  # or made; to the day

    class Meta:
        constraints = (CheckConstraint(condition=Q(view__startswith="/"), name="short_link_stays_here"),)

    def __str__(self) -> str:
        return self.code
