"""A project, as a form."""

from __future__ import annotations

from django import forms

from .base import Form


class ProjectForm(Form):
    """A new project."""

    name = forms.CharField(max_length=30, help_text="Lower-case letters, digits and -. It never changes.")
    description = forms.CharField(required=False, max_length=1000, help_text="Whose pools these are.")
