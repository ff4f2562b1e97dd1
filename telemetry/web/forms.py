"""Forms of alert rules and channels. What a value may be is decided by the services."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms
from django.db.models import QuerySet

from controlplane.models import Pool
from controlplane.web.forms.base import Form
from controlplane.web.tags import count
from telemetry.alerts.evaluate import LIMITS

LABELS = {
    "window_s": ("Window", "s"),
    "baseline_s": ("Baseline", "s"),
    "drop_points": ("Drop", "points of 100"),
    "min_requests": ("Least requests", "per window"),
    "min_tokens": ("Least queried tokens", "per window"),
    "for_s": ("Fires after", "s"),
    "keep_firing_s": ("Ends after", "s"),
}


class RuleForm(Form):
    """A rule: its name, whether it is evaluated, and its kind's settings."""

    name = forms.CharField(max_length=100)
    pool = forms.ModelChoiceField(Pool.objects.none(), empty_label=None)
    enabled = forms.BooleanField(required=False, label="Evaluate this rule")

    def __init__(self, *args: Any, pools: QuerySet[Pool] | None = None, **kwargs: Any) -> None:
        """``pools`` are those that a new rule may be for; without them it is a change."""
        super().__init__(*args, **kwargs)
        choice = self.fields["pool"]
        if pools is None:
            del self.fields["pool"]
        elif isinstance(choice, forms.ModelChoiceField):
            choice.queryset = pools
        for name, (low, high, default, meaning) in LIMITS.items():
            words = f"{meaning[0].upper()}{meaning[1:]}. {count(low)} to {count(high)}; default {count(default)}."
            field = forms.FloatField(required=False, label=LABELS[name][0], help_text=words)
            field.widget = forms.TextInput({"inputmode": "decimal", "autocomplete": "off"})
            self.fields[name] = field

    def setting_fields(self) -> Iterator[tuple[str, forms.BoundField]]:
        """Each setting's field with its unit."""
        return ((LABELS[name][1], self[name]) for name in LIMITS)

    def settings(self) -> dict[str, Any]:
        """What was filled in; an empty field takes the default."""
        return {name: self.cleaned_data[name] for name in LIMITS if self.cleaned_data.get(name) is not None}


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
