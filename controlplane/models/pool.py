"""Replicas that serve the same models."""

from django.contrib.postgres.fields import ArrayField
from django.db.models import PROTECT, CharField, DateTimeField, ForeignKey, Model, TextField

from .names import SHORT_NAME, short_name, well_formed
from .project import Project


class Pool(Model):
    """Replicas that serve the same models, and so can stand in for each other. It always has a live policy."""

    project = ForeignKey(Project, PROTECT, related_name="pools")  # who may see and change it
    name = short_name(unique=True)
    models = ArrayField(CharField(max_length=256), default=list, blank=True)  # served names; [] takes any model
    description = TextField(blank=True, max_length=1000)
    created_at = DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)
        constraints = (well_formed("pool_name_form", SHORT_NAME),)

    def __str__(self) -> str:
        return self.name
