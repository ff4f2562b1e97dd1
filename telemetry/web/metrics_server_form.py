"""The form of a metrics server. What a value may be is decided by the service."""

from __future__ import annotations

from typing import Any

from django import forms
from django.db.models import QuerySet

from controlplane.models import Pool
from controlplane.web.forms.base import Form
from telemetry.models import MetricsServer

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
        if server is None or server.sealed is None:
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
