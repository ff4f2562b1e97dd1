"""People and their roles.

A project, as a form.

API tokens, as a form.
"""

from __future__ import annotations

from django import forms

from controlplane.models import Project, Role, Scope
from controlplane.web.forms.base import Form


class PersonForm(Form):
    """Somebody new."""

    username = forms.CharField(max_length=150, widget=forms.TextInput({"autocomplete": "off"}))
    email = forms.EmailField(required=False, label="E-mail", widget=forms.EmailInput({"autocomplete": "off"}))
    password = forms.CharField(
        max_length=128,
        strip=False,
        widget=forms.PasswordInput({"autocomplete": "new-password"}),
        help_text="At least 12 characters. They can change it after signing in.",
    )


class PasswordForm(Form):
    """A new password for somebody."""

    password = forms.CharField(
        max_length=128,
        strip=False,
        label="New password",
        widget=forms.PasswordInput({"autocomplete": "new-password"}),
        help_text="At least 12 characters. Their sessions end.",
    )


class RoleForm(forms.Form):
    """A role, or none, in a project, or in all."""

    role = forms.ChoiceField(choices=[("", "none"), *Role.choices], required=False)
    project = forms.ModelChoiceField(Project.objects.all(), required=False)


class ProjectForm(Form):
    """A new project."""

    name = forms.CharField(max_length=30, help_text="Lower-case letters, digits and -. It never changes.")
    description = forms.CharField(required=False, max_length=1000, help_text="Whose pools these are.")


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
