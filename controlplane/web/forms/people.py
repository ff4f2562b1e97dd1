"""People and their roles."""

from __future__ import annotations

from django import forms

from controlplane.models import Project, Role

from .base import Form


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
