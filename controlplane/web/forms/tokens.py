"""API tokens, as a form."""

from __future__ import annotations

from django import forms

from controlplane.models import Scope

from .base import Form


class TokenForm(Form):
    """A new API token, acting for whoever makes it."""

    name = forms.CharField(max_length=100, help_text="What it is for, such as: nightly deploy.")
    scope = forms.ChoiceField(
        choices=Scope.choices, help_text="The most that it may do; it never may more than you do yourself."
    )
    days = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=3650,
        initial=90,
        label="Valid for",
        help_text="Days. Left empty, it works until it is revoked.",
    )
