"""The form of an alert rule: what every rule has, and the settings that its kind declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms
from django.db.models import QuerySet

from controlplane.errors import InvalidError
from controlplane.models import Pool
from controlplane.schema_fields import SettingInfo, canonical, kinds_of, settings_of
from controlplane.web.forms.base import Form
from controlplane.web.forms.sections import EMPTY, SettingField
from controlplane.web.forms.settings import plain_reason
from telemetry.alerts.kinds import Kind
from telemetry.models import Severity
from telemetry.models.alert_rule import REPEAT_S


class RuleForm(Form):
    """A rule of one kind. Every setting is checked by the kind's own struct."""

    name = forms.CharField(max_length=100)
    pool = forms.ModelChoiceField(Pool.objects.none(), empty_label=None)
    group = forms.CharField(
        required=False,
        max_length=63,
        label="Task group",
        widget=forms.TextInput({"autocomplete": "off", "spellcheck": "false"}),
        help_text="One of the pool's task groups, by name. Empty: the whole pool.",
    )
    severity = forms.ChoiceField(choices=Severity.choices)
    repeat_s = forms.IntegerField(
        label="Told again after",
        min_value=0,
        widget=forms.TextInput({"inputmode": "numeric", "autocomplete": "off"}),
        help_text=f"Until somebody acknowledges the alert. 0: told once; default {REPEAT_S:,}.",
    )
    enabled = forms.BooleanField(required=False, label="Evaluate this rule")

    def __init__(self, kind: Kind, *args: Any, pools: QuerySet[Pool] | None = None, **kwargs: Any) -> None:
        """``pools`` are those that a new rule may be for; without them it is a change."""
        super().__init__(*args, **kwargs)
        self.kind = kind
        choice = self.fields["pool"]
        if pools is None:
            del self.fields["pool"]
        elif isinstance(choice, forms.ModelChoiceField):
            choice.queryset = pools
        if kind.group_sources is None:
            del self.fields["group"]
        for info in settings_of(kind.settings):
            self.fields[info.field] = SettingField(info)

    def setting_fields(self) -> Iterator[tuple[SettingInfo, forms.BoundField]]:
        """Each setting's field with what is known of it."""
        return ((info, self[info.field]) for info in settings_of(self.kind.settings))

    def settings(self) -> dict[str, Any]:
        """What was filled in; an empty field takes the default."""
        filled = {info.field: self.cleaned_data.get(info.field, EMPTY) for info in settings_of(self.kind.settings)}
        return {name: value for name, value in filled.items() if value is not EMPTY}

    def rest(self) -> dict[str, Any]:
        """What is no setting of the kind, as a service's arguments."""
        names = ("name", "group", "severity", "repeat_s", "enabled")
        return {name: self.cleaned_data[name] for name in names if name in self.cleaned_data}

    def clean(self) -> dict[str, Any]:
        """Each setting judged by itself, so that all errors show at once."""
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        for info in settings_of(self.kind.settings):
            value = cleaned.get(info.field, EMPTY)
            if value is EMPTY or info.field in self.errors:
                continue
            try:
                canonical(kinds_of(self.kind.settings, info.field)[info.field], value, "$")
            except InvalidError as error:
                self.add_error(info.field, plain_reason(error.faults[0].reason))
        return cleaned
