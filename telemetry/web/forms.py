"""The field of a form that says which alerts are meant: a condition a line, so that it needs no script.

The form of a channel, made of what its kind declares. What a value may be is decided by the services.

The form of a metrics server. What a value may be is decided by the service.

The form of an alert rule: what every rule has, and the settings that its kind declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django import forms
from django.db.models import QuerySet

from controlplane.errors import InvalidError
from controlplane.models import Pool
from controlplane.schema_fields import SettingInfo, canonical, kinds_of, settings_of
from controlplane.web.forms.base import EMPTY, Form, SettingField, plain_reason
from telemetry.alerts.kinds import Kind
from telemetry.channels.base import ChannelKind, Field
from telemetry.matchers import HELP, LONGEST, MOST
from telemetry.models import MetricsServer, Severity
from telemetry.models.alert import REPEAT_S


class ConditionsField(forms.CharField):
    """Conditions in the language of ``telemetry.matchers``; what each may be is the services' to say."""

    def __init__(self, *, rows: int, empty: str = "", **kwargs: Any) -> None:
        widget = forms.Textarea({"rows": rows, "autocomplete": "off", "spellcheck": "false"})
        help_text = f"{HELP} {empty}".strip()
        super().__init__(max_length=MOST * LONGEST, widget=widget, help_text=help_text, **kwargs)

    def clean(self, value: Any) -> Any:
        """The lines that are not empty."""
        return [line.strip() for line in str(super().clean(value)).splitlines() if line.strip()]


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


_NUMBER = {"inputmode": "decimal", "autocomplete": "off"}
_PLAIN = ("name", "url", "tenant", "series_label", "replica_label", "matchers", "lookback_s", "delay_s")


class MetricsServerForm(Form):
    """A server: where it is, as whom to ask, how its series name replicas, which pools are read there."""

    name = forms.CharField(max_length=100, help_text="What it is called in lists, such as: cluster Prometheus.")
    url = forms.CharField(
        label="URL",
        max_length=2048,
        widget=forms.TextInput({"autocomplete": "off", "inputmode": "url"}),
        help_text="Up to what /api/v1/query follows, such as http://prometheus:9090.",
    )
    token = forms.CharField(
        required=False,
        max_length=4096,
        widget=forms.PasswordInput({"autocomplete": "off"}),
        help_text="Sent as a bearer token. Kept encrypted, and never shown.",
    )
    forget_token = forms.BooleanField(required=False, label="Forget the credentials that are kept")
    tenant = forms.CharField(
        required=False, max_length=150, help_text="Sent as X-Scope-OrgID, which Mimir and Thanos ask for."
    )
    series_label = forms.CharField(
        max_length=100,
        initial="instance",
        label="Label of the series",
        help_text="Its value names the replica: instance, or what your relabelling made, such as pod.",
    )
    replica_label = forms.CharField(
        required=False,
        max_length=63,
        label="Label of the replica",
        help_text="The replica's own label that holds that value. Empty: host and port of its URL.",
    )
    matchers = forms.CharField(
        required=False,
        max_length=500,
        widget=forms.TextInput({"autocomplete": "off"}),
        help_text='Narrow the series down as PromQL does: job="vllm", cluster="a".',
    )
    lookback_s = forms.FloatField(
        initial=60,
        label="Oldest sample",
        widget=forms.TextInput(_NUMBER),
        help_text="Seconds, 5 to 600: at least two scrapes of that server.",
    )
    delay_s = forms.FloatField(
        initial=0,
        label="Delay",
        widget=forms.TextInput(_NUMBER),
        help_text="Seconds, 0 to 120, after which a scrape is whole there. 0 for Prometheus; 10 behind remote write.",
    )
    pools = forms.ModelMultipleChoiceField(
        Pool.objects.none(),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="Replicas of these pools are no longer scraped directly.",
    )
    enabled = forms.BooleanField(
        required=False, initial=True, label="Read from it", help_text="Off, its pools are scraped directly again."
    )

    def __init__(self, data: Any = None, *, server: MetricsServer | None = None, pools: QuerySet[Pool]) -> None:
        super().__init__(data, initial=_initial(server))
        choice = self.fields["pools"]
        if isinstance(choice, forms.ModelMultipleChoiceField):
            choice.queryset = pools
        if server is None or server.encrypted is None:
            del self.fields["forget_token"]
        else:
            self.fields["token"].help_text = "One is kept, encrypted; left empty, it stays."

    def arguments(self) -> dict[str, Any]:
        """What was filled in, as the service takes it."""
        filled = self.cleaned_data
        given = {name: filled[name] for name in (*_PLAIN, "enabled")} | {"pools": list(filled["pools"])}
        if filled.get("forget_token"):
            given["credentials"] = {}
        elif filled["token"]:
            given["credentials"] = {"token": filled["token"]}
        return given


def _initial(server: MetricsServer | None) -> dict[str, Any]:
    if server is None:
        return {}
    shown = {name: getattr(server, name) for name in (*_PLAIN, "enabled")}
    numbers = {name: f"{shown[name]:g}" for name in ("lookback_s", "delay_s")}
    return {**shown, **numbers, "pools": [read.pool_id for read in server.read_pools.all()]}


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
