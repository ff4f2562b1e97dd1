"""What people are let into."""

from django.db.models import BooleanField, DateTimeField, Model, TextField

from .names import SHORT_NAME, short_name, well_formed


class Project(Model):
    """Pools that the same people look after. Whoever has no role in it cannot tell that it exists."""

    name = short_name(unique=True)
    description = TextField(blank=True, max_length=1000)
    needs_approval = BooleanField(default=False, db_default=False)  # what is published waits for a second person
    created_at = DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)
        constraints = (well_formed("project_name_form", SHORT_NAME),)

    def __str__(self) -> str:
        return self.name
