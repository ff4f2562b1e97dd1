"""Replicas."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.utils import timezone

from controlplane.models import Replica
from routing.schema import ReplicaConfig

from .sections import SectionedForm, Single

ADAPTERS = "Names of the pool's adapters that it holds, one a line. Left empty, routers ask it; none: it holds none."


class ReplicaForm(SectionedForm):
    """A replica, new or changed; its name never changes, and its key is never shown."""

    singles: ClassVar = (
        Single(
            "data_parallel_size",
            ReplicaConfig,
            "Data-parallel ranks",
            empty=1,
            help="Behind the URL, each with a cache of its own.",
        ),
        Single("adapters", ReplicaConfig, "Adapters", ADAPTERS),
    )

    name = forms.CharField(
        max_length=63, help_text="Its identity on every ring: it never changes, even when the URL does."
    )
    url = forms.CharField(max_length=2048, label="URL", help_text="The engine's base URL, such as http://gpu-1:8000.")
    weight = forms.FloatField(
        initial=1.0, help_text="Its capacity compared with the others. 1 unless the hardware is mixed."
    )
    labels = forms.CharField(
        required=False,
        widget=forms.Textarea({"rows": 3, "autocomplete": "off", "spellcheck": "false"}),
        help_text="To find it by, as key=value, one a line, such as zone=eu-1.",
    )
    api_key = forms.CharField(
        required=False,
        max_length=1024,
        strip=False,
        label="Engine API key",
        widget=forms.PasswordInput({"autocomplete": "new-password"}),
        help_text="What the engine asks of clients; routers send it instead of theirs. Kept encrypted and never shown.",
    )
    without_api_key = forms.BooleanField(required=False, label="Take the key away: the engine asks for none")

    def __init__(self, *args: Any, replica: Replica | None = None, **kwargs: Any) -> None:
        super().__init__(*args, row=replica, **kwargs)
        if replica is None or replica.api_key_set_at is None:
            del self.fields["without_api_key"]
        if replica is not None:
            del self.fields["name"]
            self.initial.update(url=replica.url, weight=replica.weight, labels=_lines(replica.labels))
            if replica.api_key_set_at is not None:
                at = timezone.localtime(replica.api_key_set_at)
                self.fields["api_key"].help_text = f"Set on {at:%Y-%m-%d}, and never shown. Left empty, it stays."

    def clean_labels(self) -> dict[str, str]:
        """``key=value`` a line; a line without = is a key with nothing."""
        parts = (line.partition("=") for line in self.cleaned_data["labels"].splitlines() if line.strip())
        return {key.strip(): value.strip() for key, _, value in parts}

    def clean(self) -> dict[str, Any]:
        """The key only where it changes."""
        cleaned = super().clean()
        if cleaned.pop("without_api_key", False):
            cleaned["api_key"] = None
        elif not cleaned.get("api_key"):
            cleaned.pop("api_key", None)
        return cleaned


def _lines(labels: dict[str, str]) -> str:
    return "\n".join(f"{key}={value}" for key, value in sorted(labels.items()))
