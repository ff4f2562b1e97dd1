"""Replica sources: what every kind has, and the settings of one kind as its own module describes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms

from controlplane.discovery import SourceKind
from controlplane.models import Adoption, ReplicaSource
from controlplane.schema_fields import SettingInfo, settings_of
from controlplane.services.discovery.sources import RANGES
from controlplane.web.forms.base import Form, range_text

LONG_TEXT = 1000  # characters; what may be longer gets several lines
_ADVICE = {
    "interval_s": ("Looks every", "seconds", ""),
    "deadline_s": ("Waits for an answer", "seconds", "A look that takes longer fails, and changes nothing."),
    "drain_after_s": ("Drains after", "seconds", "Missing for so long, a replica takes nothing new."),
    "remove_after_s": ("Removes after", "seconds", "Missing for so long, and drained, a replica is removed."),
    "max_vanished_ratio": (
        "Share that may go at once",
        "ratio",
        "Of the pool's replicas, so that no hiccup empties it. The last active one always stays.",
    ),
    "max_targets": ("Most engines", "", "An answer with more is refused whole."),
}


class SourceForm(Form):
    """A source of one kind; a new one gets a name too."""

    name = forms.CharField(max_length=30, help_text="Lower-case letters, digits and -. It never changes.")
    adoption = forms.ChoiceField(
        choices=((Adoption.PROPOSE, "Propose it to a person"), (Adoption.ADOPT, "Adopt it at once")),
        label="What is found",
        help_text="A person adopts or dismisses proposals on the fleet page.",
    )

    def __init__(self, kind: SourceKind, data: Any = None, *, source: ReplicaSource | None = None) -> None:
        self.kind, self.source = kind, source
        super().__init__(data, initial=_initial(source))
        for info in settings_of(kind.settings):
            self.fields[info.field] = _field(info)
        self._add_secret()
        for name in RANGES:
            self.fields[name] = _how(name)
        if source is not None:
            del self.fields["name"]
            self.fields["enabled"] = forms.BooleanField(
                required=False, label="Looks", help_text="Paused, nothing changes: neither replicas nor proposals."
            )

    def where(self) -> Iterator[tuple[str, forms.BoundField]]:
        """The kind's own fields, each with its unit."""
        names = [info.field for info in settings_of(self.kind.settings)]
        return (("", self[name]) for name in (*names, "secret", "forget_secret") if name in self.fields)

    def how(self) -> Iterator[tuple[str, forms.BoundField]]:
        """What every kind has, each with its unit."""
        return (
            (_ADVICE[name][1] if name in _ADVICE else "", self[name])
            for name in (*RANGES, "enabled")
            if name in self.fields
        )

    def arguments(self) -> dict[str, Any]:
        """What was filled in, as the services take it. An empty setting takes its default; a secret, what it was."""
        filled = self.cleaned_data
        names = [info.field for info in settings_of(self.kind.settings)]
        given = {name: filled[name] for name in (*RANGES, "adoption", "name", "enabled") if name in self.fields}
        given["settings"] = {name: filled[name] for name in names if filled.get(name) not in (None, "")}
        if filled.get("forget_secret"):
            given["secret"] = ""
        elif filled.get("secret"):
            given["secret"] = filled["secret"]
        return given

    def _add_secret(self) -> None:
        if not self.kind.secret:
            return
        kept = self.source is not None and self.source.encrypted is not None
        self.fields["secret"] = forms.CharField(
            required=False,
            label=self.kind.secret.capitalize(),
            widget=forms.PasswordInput({"autocomplete": "off"}),
            help_text="One is kept, encrypted; left empty, it stays." if kept else "Kept encrypted, and never shown.",
        )
        if kept:
            self.fields["forget_secret"] = forms.BooleanField(required=False, label=f"Forget the {self.kind.secret}")


def _initial(source: ReplicaSource | None) -> dict[str, Any]:
    row = source or ReplicaSource()
    kept = {name: getattr(row, name) for name in (*RANGES, "adoption", "enabled")}
    numbers = {name: f"{value:g}" for name, value in kept.items() if name in RANGES}
    return {**kept, **numbers, **(row.settings if source else {})}


def _field(info: SettingInfo) -> forms.Field:
    common: dict[str, Any] = {
        "required": info.required,
        "label": info.field.replace("_", " ").capitalize().replace("Api url", "API server").replace("Ca", "Authority"),
        "help_text": info.help,
        "initial": info.default,
    }
    if info.choices:
        return forms.ChoiceField(choices=[(choice, choice) for choice in info.choices], **common)
    if info.kind == "integer":
        return forms.IntegerField(widget=forms.TextInput({"inputmode": "numeric", "autocomplete": "off"}), **common)
    long = (info.high or 0) > LONG_TEXT
    widget = forms.Textarea({"rows": 4}) if long else forms.TextInput({"autocomplete": "off"})
    return forms.CharField(widget=widget, **common)


def _how(name: str) -> forms.Field:
    label, _, advice = _ADVICE[name]
    low, high = RANGES[name]
    about = range_text(SettingInfo(name, "number", "", low, high, (), None, ""))
    common: dict[str, Any] = {"label": label, "help_text": f"{advice} {about.capitalize()}.".strip()}
    kind = forms.IntegerField if name == "max_targets" else forms.FloatField
    return kind(widget=forms.TextInput({"inputmode": "decimal", "autocomplete": "off"}), **common)
