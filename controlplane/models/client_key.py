"""What clients of the routers sign in with."""

from django.conf import settings
from django.db.models import (
    CASCADE,
    PROTECT,
    CharField,
    CheckConstraint,
    DateTimeField,
    FloatField,
    ForeignKey,
    JSONField,
    Model,
    PositiveBigIntegerField,
    PositiveIntegerField,
    Q,
    UniqueConstraint,
)
from django.utils import timezone

from .names import SHORT_NAME, short_name, well_formed
from .project import Project


class ClientKey(Model):
    """A client's key to the models and task groups of one project. Only the digest that routers compare is kept.

    What it does not limit is unlimited. Routers know it by its full name, so that projects need not know each other's.
    """

    project = ForeignKey(Project, CASCADE, related_name="client_keys")
    name = short_name()
    hint = CharField(max_length=12)  # how its text begins, to tell keys apart
    digest = CharField(max_length=64, unique=True)  # SHA-256 of its text, hex: 256 random bits need no salt
    models = JSONField(null=True, blank=True)  # names that it is good for; None: all of its project's
    groups = JSONField(null=True, blank=True)  # task groups, the first for requests that name none; None: all
    tenant = CharField(max_length=30, blank=True)  # keys of one share cached prefixes with nobody else; "": none
    requests_per_s = FloatField(null=True, blank=True)
    burst = PositiveIntegerField(null=True, blank=True)  # requests at once; None: a second's worth
    tokens_per_min = PositiveBigIntegerField(null=True, blank=True)
    created_at = DateTimeField(auto_now_add=True)
    created_by = ForeignKey(settings.AUTH_USER_MODEL, PROTECT, null=True, blank=True, related_name="+")
    expires_at = DateTimeField(null=True, blank=True)  # when it ceases to work by itself; None: never
    revoked_at = DateTimeField(null=True, blank=True)  # None: it works

    class Meta:
        ordering = ("project__name", "name", "-created_at")
        constraints = (
            well_formed("client_key_name_form", SHORT_NAME),
            UniqueConstraint(fields=["project", "name"], condition=Q(revoked_at=None), name="client_key_name_unique"),
            CheckConstraint(
                condition=Q(burst=None) | Q(requests_per_s__isnull=False), name="client_key_burst_of_a_rate"
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.hint}...)"

    @property
    def has_expired(self) -> bool:
        """Whether routers refuse it although nobody revoked it."""
        return self.expires_at is not None and self.expires_at <= timezone.now()

    @property
    def full_name(self) -> str:
        """How routers and figures call it."""
        return f"{self.project.name}.{self.name}"
