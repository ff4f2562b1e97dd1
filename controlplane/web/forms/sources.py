"""The form of a replica source: common fields, and the settings of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms

from controlplane.discovery import SourceKind
from controlplane.models import Adoption, ReplicaSource
from controlplane.schema_fields import SettingInfo, settings_of
from controlplane.services.discovery.sources import RANGES
from controlplane.web.forms.base import UNSET, Form, range_text, setting_text, struct_field

_LABELS = {"api_url": "API server", "ca": "Certificate authority"}
_TIMING = {  # label, unit, help
    "interval_s": ("Poll interval", "seconds", ""),
    "deadline_s": ("Poll timeout", "seconds", "A poll that takes longer fails and changes nothing."),
    "drain_after_s": ("Drain after", "seconds", "A replica that is missing for this long receives no new requests."),
    "remove_after_s": ("Remove after", "seconds", "A drained replica that is missing for this long is removed."),
    "max_vanished_ratio": (
        "Maximum missing share",
        "ratio",
        "Of the pool's replicas that may drain at once, so that a wrong response does not empty the pool. "
        "The last active replica always stays.",
    ),
    "max_targets": ("Maximum targets", "", "A response with more is rejected as a whole."),
}


class SourceForm(Form):
    """A source of one kind. Its name cannot be changed."""

    name = forms.CharField(max_length=30, help_text="Lower-case letters, digits and -. It cannot be changed.")
    adoption = forms.ChoiceField(
        choices=((Adoption.PROPOSE, "Propose them"), (Adoption.ADOPT, "Add them automatically")),
        label="New replicas",
        help_text="Proposed replicas are adopted on the fleet page.",
    )

    def __init__(self, kind: SourceKind, data: Any = None, *, source: ReplicaSource | None = None) -> None:
        self.kind, self.source = kind, source
        super().__init__(data, initial=_initial(source))
        for info in settings_of(kind.settings):
            label = _LABELS.get(info.field, "")
            self.fields[info.field] = struct_field(kind.settings, info, required=info.required, label=label)
            self.initial[info.field] = setting_text(
                info, (source.settings if source else {}).get(info.field, info.default)
            )
        self._add_secret()
        for name in RANGES:
            self.fields[name] = _timing_field(name)
        if source is not None:
            del self.fields["name"]
            self.fields["enabled"] = forms.BooleanField(
                required=False, label="Poll this source", help_text="Off: no replica and no proposal changes."
            )

    def kind_fields(self) -> Iterator[tuple[str, forms.BoundField]]:
        """The settings of the kind, each with its unit."""
        names = [info.field for info in settings_of(self.kind.settings)]
        return (("", self[name]) for name in (*names, "secret", "forget_secret") if name in self.fields)

    def timing_fields(self) -> Iterator[tuple[str, forms.BoundField]]:
        """The fields that every kind has, each with its unit."""
        units = {name: unit for name, (_, unit, _) in _TIMING.items()}
        return ((units.get(name, ""), self[name]) for name in (*RANGES, "enabled") if name in self.fields)

    def arguments(self) -> dict[str, Any]:
        """The arguments of the service. An empty setting takes its default, and an empty secret stays as it is."""
        values = self.cleaned_data
        names = [info.field for info in settings_of(self.kind.settings)]
        arguments = {name: values[name] for name in (*RANGES, "adoption", "name", "enabled") if name in self.fields}
        arguments["settings"] = {name: values[name] for name in names if values.get(name, UNSET) is not UNSET}
        if values.get("forget_secret"):
            arguments["secret"] = ""
        elif values.get("secret"):
            arguments["secret"] = values["secret"]
        return arguments

    def _add_secret(self) -> None:
        if not self.kind.secret:
            return
        is_set = self.source is not None and self.source.encrypted is not None
        self.fields["secret"] = forms.CharField(
            required=False,
            label=self.kind.secret.capitalize(),
            widget=forms.PasswordInput({"autocomplete": "off"}),
            help_text="Set, stored encrypted. Leave empty to keep it." if is_set else "Stored encrypted, never shown.",
        )
        if is_set:
            self.fields["forget_secret"] = forms.BooleanField(required=False, label=f"Remove the {self.kind.secret}")


def _initial(source: ReplicaSource | None) -> dict[str, Any]:
    row = source or ReplicaSource()
    timing = {name: f"{getattr(row, name):g}" for name in RANGES}
    return {**timing, "adoption": row.adoption, "enabled": row.enabled}


def _timing_field(name: str) -> forms.Field:
    label, _, advice = _TIMING[name]
    low, high = RANGES[name]
    allowed = range_text(SettingInfo(name, "number", "", low, high, (), None, ""))
    field = forms.IntegerField if name == "max_targets" else forms.FloatField
    widget = forms.TextInput({"inputmode": "decimal", "autocomplete": "off"})
    return field(label=label, help_text=f"{advice} {allowed.capitalize()}.".strip(), widget=widget)
