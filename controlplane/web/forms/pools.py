"""Pools and projects."""

from __future__ import annotations

from typing import Any

from django import forms
from django.db.models import QuerySet

from controlplane.models import Project

from .base import Form


class PoolForm(Form):
    """A new pool, of one of the projects that it may be made in."""

    project = forms.ModelChoiceField(
        Project.objects.none(), empty_label=None, help_text="Who may see and change it: people hold roles in projects."
    )

    name = forms.CharField(
        max_length=30, help_text="Lower-case letters, digits and -. It labels every figure and never changes."
    )
    models = forms.CharField(
        required=False,
        widget=forms.Textarea({"rows": 2}),
        help_text="Served model names, one a line. Left empty, the pool takes any model.",
    )
    description = forms.CharField(required=False, max_length=1000, help_text="What it is for, and who to ask.")

    def __init__(self, projects: QuerySet[Project], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["project"]
        if not projects.exists():
            del self.fields["project"]  # the first pool makes the first project
        elif isinstance(field, forms.ModelChoiceField):
            field.queryset = projects

    def clean_models(self) -> list[str]:
        """One name a line; empty lines do not count."""
        return [line.strip() for line in self.cleaned_data["models"].splitlines() if line.strip()]


class ProjectForm(Form):
    """A new project."""

    name = forms.CharField(max_length=30, help_text="Lower-case letters, digits and -. It never changes.")
    description = forms.CharField(required=False, max_length=1000, help_text="Whose pools these are.")
