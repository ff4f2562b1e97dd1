"""Forms of channels, the heartbeat, Prometheus servers, alert rules, silences and read-only links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.db.models import QuerySet
from django.http import QueryDict

from controlplane.models import Pool, Project
from controlplane.schema_fields import SettingInfo, settings_of
from controlplane.web.forms.base import UNSET, Form, struct_field
from controlplane.web.forms.fleet import choose_from
from telemetry.alerts.kinds import Kind
from telemetry.channels.base import ChannelKind, ConfigError, Field
from telemetry.matchers import HELP, MAX_CHARS, MAX_MATCHERS
from telemetry.models import MetricsServer, Severity, Topic
from telemetry.models.alert import REPEAT_S
from telemetry.services.metrics_servers import SETTINGS
from telemetry.services.notifications.heartbeats import MAX_S, MIN_S
from telemetry.web.ranges import DEFAULT, SHOWN_DEFAULT, requested_range

RESERVED_NAMES = frozenset({"name", "matchers", "enabled"})  # no setting of a channel kind has these names
SETTING_LABELS = {  # of rules, where the field's name alone is not clear
    "accept_s": "Accept as new level after",
    "after_s": "Fire when behind for",
    "baseline_s": "Baseline period",
    "behind_s": "Fire when behind for",
    "bin_s": "Bin length",
    "burn_rate": "Fire at a burn rate of",
    "days": "Days of history",
    "drop_points": "Fire at a drop of",
    "ejected_s": "Fire when ejected for",
    "floor_ratio": "Fire at a hit rate below",
    "for_s": "Pending for",
    "gap_points": "Fire at a difference of",
    "keep_firing_s": "Resolve after",
    "long_s": "Long window",
    "min_replicas": "Replicas needed for a result",
    "min_requests": "Requests needed for a result",
    "min_tokens": "Tokens needed for a result",
    "min_waiting": "Waiting requests needed to fire",
    "most_over_mean": "Fire at busiest replica / mean of",
    "most_ratio": "Fire at a share of failed requests of",
    "objective_ratio": "Objective",
    "preemptions_per_minute": "Fire at preemptions of",
    "quiet_days": "Time between false alarms",
    "short_s": "Short window",
    "silent_s": "Fire when not scraped for",
    "usage_ratio": "Fire at a KV usage of",
    "warm_up_s": "Warm-up after a restart",
    "window_s": "Window",
    "within_s": "First token within",
}
MAX_LINES = 10_000  # characters of a setting of a channel that has several lines
SILENCE_HOURS = (("1", "1 hour"), ("4", "4 hours"), ("24", "1 day"), ("168", "7 days"), ("720", "30 days"))
LINK_HOURS = (("1", "1 hour"), ("24", "1 day"), ("168", "7 days"), ("720", "30 days"))
_LINES = {"autocomplete": "off", "spellcheck": "false"}
_NUMBER = {"inputmode": "decimal", "autocomplete": "off"}


class MatchersField(forms.CharField):
    """Matchers of alerts (``telemetry.matchers``), one per line."""

    def __init__(self, *, rows: int, empty_help: str = "", **kwargs: Any) -> None:
        widget = forms.Textarea({"rows": rows, **_LINES})
        super().__init__(
            max_length=MAX_MATCHERS * MAX_CHARS, widget=widget, help_text=f"{HELP} {empty_help}".strip(), **kwargs
        )

    def clean(self, value: Any) -> Any:
        """The lines that are not empty."""
        return [line.strip() for line in str(super().clean(value)).splitlines() if line.strip()]


_TOPIC_HELP: dict[str, str] = {
    Topic.WEEKLY_SUMMARY: "Each Monday, what prefix caches saved in the week before; the first comes within an hour.",
    Topic.ROLLOUTS: "When a rollout starts, enters a step, is on hold, is rolled back (with the reason), or ends.",
}


class ChannelForm(Form):
    """A channel: name, matchers and the settings of its kind. ``stored`` holds the settings of an existing
    channel: values that are not secret, and the names of its secrets.
    """

    name = forms.CharField(max_length=100, help_text="Shown in lists, such as: on-call chat.")
    matchers = MatchersField(label="Only alerts with", rows=2, required=False, empty_help="Empty: all alerts.")

    def __init__(self, kind: ChannelKind, *args: Any, stored: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kind, self.stored, self.has_preview = kind, stored, kind.preview is not None
        for topic in map(Topic, kind.topics):
            self.fields[topic] = forms.BooleanField(label=topic.label, required=False, help_text=_TOPIC_HELP[topic])
        for field in kind.fields:
            self.fields[field.name] = self._form_field(field)
        self.order_fields(["name", *(field.name for field in kind.fields), "matchers", *Topic.values])

    def _form_field(self, field: Field) -> forms.Field:
        is_set = self.stored is not None and field.name in self.stored.get("secrets", ())
        help_text = f"{field.help} Stored encrypted; leave empty to keep it." if is_set else field.help
        initial = None if field.secret else field.default if self.stored is None else self.stored.get(field.name)
        options: dict[str, Any] = {
            "label": field.label,
            "required": field.required and not is_set,
            "help_text": help_text,
            "initial": ", ".join(initial) if isinstance(initial, list) else initial,
        }
        if field.choices:
            return forms.ChoiceField(choices=field.choices, **options)
        attributes = dict(_LINES)
        if field.secret and self.stored is not None:
            attributes["placeholder"] = "set" if is_set else "not set"
        if field.rows > 1:
            widget = forms.Textarea({"rows": field.rows, **attributes})
            return forms.CharField(max_length=MAX_LINES, widget=widget, **options)
        return forms.CharField(max_length=4000, widget=forms.TextInput(attributes), **options)

    def preview(self) -> str:
        """What the channel sends for an example, of kinds that have a preview; "" if the settings are invalid."""
        if self.kind.preview is None:
            return ""
        shown = [field for field in self.kind.fields if not field.secret]
        try:
            return self.kind.preview({field.name: field.complete(self[field.name].value()) for field in shown})
        except ConfigError as error:
            if self.is_bound and error.field not in self.errors:
                self.add_error(error.field, error.reason)
            return ""

    def removable(self) -> list[Field]:
        """Secrets that are set and optional. A secret that is generated by default is replaced by a new one."""
        secrets = self.stored.get("secrets", ()) if self.stored is not None else ()
        return [field for field in self.kind.fields if field.name in secrets and not field.required]

    def topics(self) -> list[str]:
        """What the channel is to get besides alerts."""
        return [topic for topic in Topic.values if self.cleaned_data.get(topic)]

    def config(self) -> dict[str, Any]:
        """The settings. A change includes emptied settings as None, but no empty secret."""
        values = {field: self.cleaned_data[field.name] or None for field in self.kind.fields}
        if self.stored is None:
            return {field.name: value for field, value in values.items() if value is not None}
        return {field.name: value for field, value in values.items() if value is not None or not field.secret}


class HeartbeatForm(Form):
    """The heartbeat. An empty URL keeps the stored one."""

    url = forms.CharField(
        label="URL",
        required=False,
        max_length=2048,
        widget=forms.TextInput(_LINES | {"inputmode": "url"}),
        help_text="From the monitoring service. Stored encrypted and never shown. Leave empty to keep a stored URL.",
    )
    every_s = forms.IntegerField(label="Interval", help_text=f"Seconds, {MIN_S} to {MAX_S:,}.")


class MetricsServerForm(Form):
    """A Prometheus server: its address, how its series name replicas, and the pools that are read from it."""

    name = forms.CharField(max_length=100, help_text="Shown in lists, such as: cluster Prometheus.")
    url = forms.CharField(
        label="URL",
        max_length=2048,
        widget=forms.TextInput({"autocomplete": "off", "inputmode": "url"}),
        help_text="The part before /api/v1/query, such as http://prometheus:9090.",
    )
    token = forms.CharField(
        required=False,
        max_length=4096,
        widget=forms.PasswordInput({"autocomplete": "off"}),
        help_text="Sent as a bearer token. Stored encrypted, never shown.",
    )
    forget_token = forms.BooleanField(required=False, label="Remove the stored credentials")
    tenant = forms.CharField(
        required=False, max_length=150, help_text="Sent as X-Scope-OrgID, which Mimir and Thanos require."
    )
    series_label = forms.CharField(
        max_length=100,
        initial="instance",
        label="Series label",
        help_text="The label whose value identifies the replica: instance, or one that your relabelling adds, such "
        "as pod.",
    )
    replica_label = forms.CharField(
        required=False,
        max_length=63,
        label="Replica label",
        help_text="The replica's own label with the same value. Empty: host and port of its URL.",
    )
    matchers = forms.CharField(
        required=False,
        max_length=500,
        widget=forms.TextInput({"autocomplete": "off"}),
        help_text='Label matchers in PromQL: job="vllm", cluster="a".',
    )
    lookback_s = forms.FloatField(
        initial=60,
        label="Maximum sample age",
        widget=forms.TextInput(_NUMBER),
        help_text="Seconds, 5 to 600. At least two scrape intervals of that server.",
    )
    delay_s = forms.FloatField(
        initial=0,
        label="Delay",
        widget=forms.TextInput(_NUMBER),
        help_text="Seconds, 0 to 120, until a scrape is complete there. 0 for Prometheus; 10 behind remote write.",
    )
    pools = forms.ModelMultipleChoiceField(
        Pool.objects.none(),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="The replicas of these pools are read from this server and not scraped.",
    )
    enabled = forms.BooleanField(
        required=False, initial=True, label="Enabled", help_text="Disabled: its pools are scraped directly."
    )

    def __init__(self, data: Any = None, *, server: MetricsServer | None = None, pools: QuerySet[Pool]) -> None:
        initial: dict[str, Any] = {}
        if server is not None:
            initial = {name: getattr(server, name) for name in SETTINGS}
            initial |= {name: f"{initial[name]:g}" for name in ("lookback_s", "delay_s")}
            initial["pools"] = [row.pool_id for row in server.read_pools.all()]
        super().__init__(data, initial=initial)
        choose_from(self.fields["pools"], pools)
        if server is None or server.encrypted is None:
            del self.fields["forget_token"]
        else:
            self.fields["token"].help_text = "Set, stored encrypted. Leave empty to keep it."

    def arguments(self) -> dict[str, Any]:
        """The arguments of the service."""
        values = self.cleaned_data
        arguments = {name: values[name] for name in SETTINGS} | {"pools": list(values["pools"])}
        if values.get("forget_token"):
            arguments["credentials"] = {}
        elif values["token"]:
            arguments["credentials"] = {"token": values["token"]}
        return arguments


class RuleForm(Form):
    """An alert rule of one kind. ``pools`` are the choices of a new rule."""

    name = forms.CharField(max_length=100)
    pool = forms.ModelChoiceField(Pool.objects.none(), empty_label=None)
    group = forms.CharField(
        required=False,
        max_length=63,
        label="Task group",
        widget=forms.TextInput(_LINES),
        help_text="One of the pool's task groups. Empty: the whole pool.",
    )
    severity = forms.ChoiceField(choices=Severity.choices)
    repeat_s = forms.IntegerField(
        label="Repeat notifications every",
        min_value=0,
        widget=forms.TextInput({"inputmode": "numeric", "autocomplete": "off"}),
        help_text=f"Until the alert is acknowledged. 0: notify once; default {REPEAT_S:,}.",
    )
    runbook_url = forms.CharField(
        required=False,
        max_length=500,
        label="Runbook",
        widget=forms.TextInput({"inputmode": "url", "autocomplete": "off", "spellcheck": "false"}),
        help_text="Address of your own instructions, https://host/path; shown with the alert and in its messages.",
    )
    enabled = forms.BooleanField(required=False, label="Enabled")

    def __init__(self, kind: Kind, *args: Any, pools: QuerySet[Pool] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kind = kind
        if pools is None:
            del self.fields["pool"]
        else:
            choose_from(self.fields["pool"], pools)
        if kind.group_sources is None:
            del self.fields["group"]
        for info in settings_of(kind.settings):
            self.fields[info.field] = struct_field(kind.settings, info, label=SETTING_LABELS.get(info.field, ""))

    def setting_fields(self) -> Iterator[tuple[SettingInfo, forms.BoundField]]:
        """Each setting of the kind with its field."""
        return ((info, self[info.field]) for info in settings_of(self.kind.settings))

    def settings(self) -> dict[str, Any]:
        """The settings of the kind that were filled in."""
        values = {info.field: self.cleaned_data.get(info.field, UNSET) for info in settings_of(self.kind.settings)}
        return {name: value for name, value in values.items() if value is not UNSET}

    def arguments(self) -> dict[str, Any]:
        """The arguments of the service, except the pool."""
        names = ("name", "group", "severity", "repeat_s", "runbook_url", "enabled")
        return {name: self.cleaned_data[name] for name in names if name in self.fields} | {"settings": self.settings()}


class SilenceForm(Form):
    """A new silence. ``everywhere`` is whether the user may silence all projects at once.

    ``several``: of alerts that are selected already.
    """

    matchers = MatchersField(label="Alerts with", rows=4)
    hours = forms.ChoiceField(label="Duration", choices=SILENCE_HOURS, initial="4")
    project = forms.ModelChoiceField(Project.objects.none(), required=False, empty_label="all projects")
    comment = forms.CharField(max_length=500, label="Reason", help_text="For everyone who sees a silenced alert.")

    def __init__(self, *args: Any, projects: QuerySet[Project], everywhere: bool, several: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if several:
            del self.fields["matchers"], self.fields["project"]
            return
        choice = self.fields["project"]
        choose_from(choice, projects)
        if isinstance(choice, forms.ModelChoiceField) and not everywhere:
            choice.required, choice.empty_label = True, None


class SharedLinkForm(Form):
    """A new read-only link to the wall of a pool, for a live range or a fixed one."""

    pool = forms.ModelChoiceField(Pool.objects.none(), to_field_name="name", empty_label=None)
    range = forms.CharField(label="Last", initial="1h", required=False, help_text="A live range, such as 15m or 7d.")
    start = forms.CharField(label="Or from (UTC)", required=False, help_text="A fixed range, such as 2026-01-31T13:45.")
    end = forms.CharField(label="To (UTC)", required=False)
    hours = forms.ChoiceField(label="Valid for", choices=LINK_HOURS, initial="168")

    def __init__(self, *args: Any, pools: QuerySet[Pool], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choose_from(self.fields["pool"], pools)

    def clean(self) -> dict[str, Any]:
        """The query of the time range, or why it is none."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        fixed = {"from": values.get("start"), "to": values.get("end")}
        chosen = fixed if any(fixed.values()) else {"range": values.get("range") or DEFAULT}
        values["query"] = urlencode({name: value or "" for name, value in chosen.items()})
        if error := requested_range(QueryDict(values["query"])).error:
            self.add_error("range" if "range" in chosen else "start", error.partition(SHOWN_DEFAULT)[0].strip())
        return values
