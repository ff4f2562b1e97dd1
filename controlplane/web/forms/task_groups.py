"""Task groups."""

from __future__ import annotations

from typing import Any

from django import forms

from controlplane.models import Pool, Replica, TaskGroup

from .base import Form


class TaskGroupForm(Form):
    """A task group, new or changed."""

    name = forms.CharField(max_length=30, help_text="What clients send in the X-Task-Group header. It never changes.")
    owner = forms.CharField(required=False, max_length=200, help_text="Who to ask: a team, an address.")
    description = forms.CharField(required=False, max_length=1000)
    replicas = forms.ModelMultipleChoiceField(
        Replica.objects.none(),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="Tick none to use all replicas of the pool.",
    )

    def __init__(self, pool: Pool, *args: Any, group: TaskGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["replicas"]
        if isinstance(field, forms.ModelMultipleChoiceField):
            field.queryset = pool.replicas.all()
        if group is not None:
            del self.fields["name"]
