"""Forms of channels. What a value may be is decided by the services."""

from __future__ import annotations

from django import forms

from controlplane.web.forms.base import Form


class ChannelForm(Form):
    """A new webhook."""

    name = forms.CharField(max_length=100, help_text="What it is called in lists, such as: on-call chat.")
    url = forms.CharField(
        label="URL",
        max_length=2048,
        widget=forms.TextInput({"autocomplete": "off", "inputmode": "url"}),
        help_text="Each alert is sent here as JSON, signed as Standard Webhooks says. It is kept encrypted and never "
        "shown again in full.",
    )
    secret = forms.CharField(
        required=False,
        widget=forms.TextInput({"autocomplete": "off"}),
        help_text="The receiver's signing secret, whsec_... Left empty, one is made and shown once.",
    )
