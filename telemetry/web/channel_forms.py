"""The form of a channel, made of what its kind declares. What a value may be is decided by the services."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django import forms

from controlplane.web.forms.base import Form
from telemetry.channels.base import ChannelKind
from telemetry.channels.fields import Field
from telemetry.web.conditions import ConditionsField

NAMED = "What it is called in lists, such as: on-call chat."
KEPT = "A value is kept encrypted; left empty, it stays as it is."
NOT_TWICE = frozenset({"name", "matchers", "enabled"})  # a field of a kind never has these names


class ChannelForm(Form):
    """A channel: its name, which alerts go there, and the settings of its kind. ``shown`` makes it a change."""

    name = forms.CharField(max_length=100, help_text=NAMED)
    matchers = ConditionsField(label="Only alerts with", rows=2, required=False, empty="Empty: every alert.")

    def __init__(self, kind: ChannelKind, *args: Any, shown: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """``shown`` is what may be shown of a config that there is."""
        super().__init__(*args, **kwargs)
        self.kind, self.shown = kind, shown
        for field in kind.fields:
            self.fields[field.name] = self._form_field(field)

    def _form_field(self, field: Field) -> forms.Field:
        is_set = self.shown is not None and field.name in self.shown.get("secrets", ())
        words = f"{field.help} {KEPT}" if is_set else field.help
        options: dict[str, Any] = {"label": field.label, "required": field.required and not is_set, "help_text": words}
        if field.choices:
            return forms.ChoiceField(choices=field.choices, initial=self._initial(field), **options)
        attributes = {"autocomplete": "off", "spellcheck": "false"}
        if field.secret and self.shown is not None:
            attributes["placeholder"] = "set" if is_set else "not set"
        return forms.CharField(
            max_length=4000, initial=self._initial(field), widget=forms.TextInput(attributes), **options
        )

    def _initial(self, field: Field) -> Any:
        if field.secret:
            return None
        value = field.default if self.shown is None else self.shown.get(field.name)
        return ", ".join(value) if isinstance(value, list) else value

    def setting_fields(self) -> Iterator[forms.BoundField]:
        """The fields of its kind."""
        return (self[field.name] for field in self.kind.fields)

    def removable(self) -> list[Field]:
        """Secrets that are set and need not be; one that is made where none is given is made anew."""
        hidden = self.shown.get("secrets", ()) if self.shown is not None else ()
        return [field for field in self.kind.fields if field.name in hidden and not field.required]

    def config(self) -> dict[str, Any]:
        """What was filled in. Of a change also what was emptied, as None; a secret left empty stays out of it."""
        given = {field: self.cleaned_data[field.name] or None for field in self.kind.fields}
        if self.shown is None:
            return {field.name: value for field, value in given.items() if value is not None}
        return {field.name: value for field, value in given.items() if value is not None or not field.secret}
