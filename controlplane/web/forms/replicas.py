"""Replicas."""

from __future__ import annotations

from django import forms

from .base import Form


class ReplicaForm(Form):
    """A new replica."""

    name = forms.CharField(
        max_length=63, help_text="Its identity on every ring: it never changes, even when the URL does."
    )
    url = forms.CharField(max_length=2048, label="URL", help_text="The engine's base URL, such as http://gpu-1:8000.")
    weight = forms.FloatField(
        initial=1.0, help_text="Its capacity compared with the others. 1 unless the hardware is mixed."
    )
