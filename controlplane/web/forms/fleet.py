"""Forms of pools, replicas, task groups, client keys and the routers' limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django import forms
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.kv_cache import Costs, KvCache
from controlplane.models import ClientKey, FleetSettings, Pool, Project, Replica, TaskGroup
from controlplane.services.fleet.task_groups import CACHE_KEY_EXPECTED
from controlplane.services.policies.publish_checks import PredictionPolicy
from controlplane.web.forms.base import DEFAULTS_APPLY, ROUTER_DEFAULTS, Form, Section, SectionedForm, Single
from routing import schema

MODELS = "Served model names, one per line. Empty: the pool accepts any model."
NO_LIMIT = "no limit"
SESSION_KEYS = (
    "Where requests name their session, in order, one per line: header:NAME, or a field such as body:user. The first "
    "that a request has is its session key. Empty: the headers and fields of known clients. none: requests have "
    "no session."
)
ORIGINS = (
    "Origins of the web pages whose scripts may use the pool (CORS), one per line, such as https://chat.example. "
    "*: all. Empty: none, browsers keep responses from other sites' pages."
)
PATHS = "The paths that the pool serves, one per line. Requests for others get 404. Empty: all."
_LINES = {"autocomplete": "off", "spellcheck": "false"}


def choose_from(field: forms.Field, rows: QuerySet[Any]) -> None:
    """Set the rows that a model choice field offers."""
    if isinstance(field, forms.ModelChoiceField):
        field.queryset = rows


class ClientKeyForm(SectionedForm):
    """A client key. Name and project are set once, when the key is created."""

    singles: ClassVar = (
        Single(
            "models", schema.ApiKey, "Models", "Models that the key may use, one per line. Empty: all of its project."
        ),
        Single(
            "groups",
            schema.ApiKey,
            "Task groups",
            "Task groups that the key may name, one per line. Requests that name none belong to the first. Empty: all.",
        ),
        Single("tenant", schema.ApiKey, "Tenant", empty=""),
        Single("requests_per_s", schema.ApiKey, "Requests per second"),
        Single("burst", schema.ApiKey, "Burst", "Requests that may arrive at once. Empty: one second's worth."),
        Single("tokens_per_min", schema.ApiKey, "Tokens per minute"),
        Single("queue_weight", schema.ApiKey, "Weight in admission queues", empty=1.0),
    )

    expires_at = forms.DateTimeField(
        required=False, label="Expires", help_text="In UTC, such as 2031-03-04 12:00. Empty: never."
    )
    name = forms.CharField(max_length=30, help_text="The client that will use it, such as: nightly-batch.")
    project = forms.ModelChoiceField(
        Project.objects.none(), empty_label=None, help_text="The key gives access to this project's models only."
    )

    def __init__(self, *args: Any, projects: QuerySet[Project], key: ClientKey | None = None, **kwargs: Any) -> None:
        super().__init__(*args, row=key, **kwargs)
        self.fields["expires_at"].initial = key.expires_at if key else None
        choose_from(self.fields["project"], projects)
        if key is not None:
            del self.fields["name"], self.fields["project"]
        self.order_fields(["project", "name"])


class LimitsForm(SectionedForm):
    """Limits and timeouts of every router."""

    sections: ClassVar = (
        Section(
            "limits",
            schema.Limits,
            "Limits",
            "They apply to each router process. Empty fields take the default.",
            ROUTER_DEFAULTS,
        ),
    )

    def __init__(self, *args: Any, settings: FleetSettings, **kwargs: Any) -> None:
        super().__init__(*args, row=settings, **kwargs)


class PoolForm(Form):
    """A new pool in one of ``projects``. The first pool also creates the first project."""

    project = forms.ModelChoiceField(
        Project.objects.none(), empty_label=None, help_text="Users get access to a pool through roles in its project."
    )
    name = forms.CharField(
        max_length=30, help_text="Lower-case letters, digits and -. Metrics carry it as a label; it cannot be changed."
    )
    models = forms.CharField(required=False, widget=forms.Textarea({"rows": 2}), help_text=MODELS)
    description = forms.CharField(required=False, max_length=1000, help_text="Purpose and contact.")

    def __init__(self, projects: QuerySet[Project], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if projects.exists():
            choose_from(self.fields["project"], projects)
        else:
            del self.fields["project"]

    def clean_models(self) -> list[str]:
        """One name per line, without empty lines."""
        return [line.strip() for line in self.cleaned_data["models"].splitlines() if line.strip()]


class PoolSettingsForm(SectionedForm):
    """All settings of a pool except its name and project."""

    sections: ClassVar = (
        Section(
            "health", schema.HealthCheck, "Health checks", "How routers check that a replica responds.", ROUTER_DEFAULTS
        ),
        Section(
            "breaker",
            schema.BreakerConfig,
            "Circuit breaker",
            "When routers eject a replica whose requests fail although its health checks pass, and readmit it.",
            ROUTER_DEFAULTS,
        ),
        Section(
            "warm_up",
            schema.WarmUp,
            "Warm-up",
            "A new or recovered replica first computes the prompt prefixes assigned to it, and then receives traffic.",
            "off: a new replica receives traffic with a cold cache",
        ),
        Section(
            "concurrency",
            schema.ConcurrencyConfig,
            "Concurrency limit",
            "Requests of the pool that may run at once per router. Further requests wait in the router. Tenants, else "
            "API keys, else task groups have equal shares of tokens, or shares by the weights of their keys.",
            NO_LIMIT,
        ),
        Section(
            "caps",
            schema.Caps,
            "Limits per request",
            "Routers reject a request that exceeds one of these.",
            ROUTER_DEFAULTS,
        ),
        Section(
            "tier1",
            schema.Tier1,
            "Tier-1 prefix",
            "Where the part of the prompt that a task group shares ends. Task groups may override it.",
            "as each policy sets it",
        ),
        Section(
            "disaggregation",
            schema.Disaggregation,
            "Disaggregated prefill",
            "Which prompts are computed by the pool's prefill replicas. No effect if no replica has the role prefill.",
            ROUTER_DEFAULTS,
        ),
        Section(
            "kv_cache",
            KvCache,
            "KV cache of the model",
            "Turns tokens into bytes: paste the model's config.json, or enter the bytes per token.",
            "unknown: sizes are shown in tokens only",
        ),
        Section(
            "costs",
            Costs,
            "Prices",
            "Turns GPU time into money on the pages Value, Capacity and cost, and Before and after.",
            "unknown: no money is shown",
        ),
        Section(
            "what_if",
            PredictionPolicy,
            "Prediction before publishing",
            "Whether a draft needs a what-if before it is published, and how much worse than the active policy it may "
            "be predicted to be. Only approvers can change this.",
            DEFAULTS_APPLY,
        ),
    )
    singles: ClassVar = (
        Single("models", schema.PoolConfig, "Models", MODELS, empty=[]),
        Single(
            "aliases",
            schema.PoolConfig,
            "Aliases",
            "Other names for these models, one per line, as name = model. Engines receive the model.",
            empty=[],
        ),
        Single(
            "adapters",
            schema.PoolConfig,
            "Adapters",
            "LoRA adapters of its replicas, one per line, as name = base model.",
            empty=[],
        ),
        Single("adapter_replicas", schema.PoolConfig, "Replicas per adapter"),
        Single("stream_usage", schema.PoolConfig, "Token usage of streams"),
        Single("on_stream_failure", schema.PoolConfig, "Streams whose replica fails"),
        Single("keep_alive_s", schema.PoolConfig, "Comments to silent streams"),
        Single("session_keys", schema.PoolConfig, "Session keys", SESSION_KEYS),
        Single("paths", schema.PoolConfig, "Paths", PATHS),
        Single("allowed_origins", schema.PoolConfig, "Allowed origins", ORIGINS, empty=[]),
    )

    description = forms.CharField(required=False, max_length=1000, help_text="Purpose and contact.")

    def __init__(self, *args: Any, pool: Pool, **kwargs: Any) -> None:
        super().__init__(*args, row=pool, **kwargs)
        self.initial.setdefault("description", pool.description)


class ReplicaForm(SectionedForm):
    """A replica. Its name cannot be changed, and its API key is never shown."""

    sections: ClassVar = (
        Section(
            "kv_events",
            schema.KvEvents,
            "KV events",
            "Routers follow these events to know what this replica has cached instead of estimating it. Start vLLM "
            "with --kv-events-config and an endpoint to bind to, such as tcp://*:5557.",
            "off: routers estimate what it has cached",
        ),
    )
    singles: ClassVar = (
        Single(
            "data_parallel_size",
            schema.ReplicaConfig,
            "Data-parallel ranks",
            "Ranks behind the URL; each has its own cache.",
            empty=1,
        ),
        Single(
            "role",
            schema.ReplicaConfig,
            "Role",
            "both: serves requests. prefill: only computes long prompts for the pool's other replicas, which fetch the "
            "KV blocks. decode: serves requests; its own hit rate is left out of figures. If any replica has the role "
            "prefill, the engines need vLLM's NixlConnector.",
            empty=schema.ReplicaRole.BOTH.value,
        ),
        Single(
            "adapters",
            schema.ReplicaConfig,
            "Adapters",
            "Adapters of the pool that this replica has loaded, one per line. Empty: routers query the replica. "
            "none: it has loaded no adapter.",
        ),
    )

    name = forms.CharField(max_length=63, help_text="Requests are assigned by this name, so it cannot be changed.")
    url = forms.CharField(max_length=2048, label="URL", help_text="The engine's base URL, such as http://gpu-1:8000.")
    weight = forms.FloatField(
        initial=1.0, help_text="Capacity relative to the other replicas. Use 1 if all have the same hardware."
    )
    labels = forms.CharField(
        required=False,
        widget=forms.Textarea({"rows": 3, **_LINES}),
        help_text="key=value, one per line, such as zone=eu-1.",
    )
    api_key = forms.CharField(
        required=False,
        max_length=1024,
        strip=False,
        label="Engine API key",
        widget=forms.PasswordInput({"autocomplete": "new-password"}),
        help_text="Routers send it to the engine instead of the client's key. Stored encrypted and never shown.",
    )
    without_api_key = forms.BooleanField(required=False, label="Remove the API key: the engine requires none")

    def __init__(
        self, *args: Any, replica: Replica | None = None, events: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """``events`` fill in the fields of KV events instead of the replica's own values."""
        super().__init__(*args, row=replica, **kwargs)
        self.initial.update({f"kv_events-{name}": value or "" for name, value in (events or {}).items()})
        if replica is None or replica.api_key_set_at is None:
            del self.fields["without_api_key"]
        if replica is not None:
            del self.fields["name"]
            labels = "\n".join(f"{key}={value}" for key, value in sorted(replica.labels.items()))
            self.initial.update(url=replica.url, weight=replica.weight, labels=labels)
            if replica.api_key_set_at is not None:
                at = timezone.localtime(replica.api_key_set_at)
                self.fields["api_key"].help_text = f"Set on {at:%Y-%m-%d}, never shown. Leave empty to keep it."

    def clean_labels(self) -> dict[str, str]:
        """``key=value`` per line; a line without = is a key with an empty value."""
        parts = (line.partition("=") for line in self.cleaned_data["labels"].splitlines() if line.strip())
        return {key.strip(): value.strip() for key, _, value in parts}

    def clean(self) -> dict[str, Any]:
        """Include ``api_key`` only if it changes."""
        cleaned = super().clean()
        if cleaned.pop("without_api_key", False):
            cleaned["api_key"] = None
        elif not cleaned.get("api_key"):
            cleaned.pop("api_key", None)
        return cleaned


class TaskGroupForm(SectionedForm):
    """A task group. Its name cannot be changed."""

    sections: ClassVar = (
        Section(
            "match",
            schema.GroupMatch,
            "Matching requests",
            "Requests that name the group in X-Task-Group belong to it, and so do requests that match any of these. "
            "Two groups cannot match the same value.",
            "header only",
        ),
        Section(
            "tier1",
            schema.Tier1,
            "Tier-1 prefix",
            "Where the part of the prompt that all requests of the group share ends. Requests are placed by it.",
            "as its pool or policy sets it",
        ),
        Section(
            "concurrency",
            schema.ConcurrencyConfig,
            "Concurrency limit",
            "Requests of the group that may run at once, in addition to the pool's limit. Further requests wait.",
            NO_LIMIT,
        ),
        Section(
            "caps",
            schema.GroupCaps,
            "Limits per request",
            "A value here overrides the pool's.",
            "as its pool sets them",
        ),
        Section(
            "response_cache",
            schema.ResponseCache,
            "Response cache",
            "Serves the stored response when an identical deterministic request comes again. Responses are encrypted.",
            "off",
        ),
        Section(
            "semantic_cache",
            schema.SemanticCache,
            "Semantic cache",
            "Also serves the stored response of a request whose last user message means the same, once its measured "
            "precision allows it. Needs the response cache, and a pool that serves /v1/embeddings.",
            "off",
        ),
    )
    singles: ClassVar = (
        Single("priority", schema.TaskGroupConfig, "Priority", empty=0),
        Single("ttft_objective_ms", schema.TaskGroupConfig, "TTFT objective"),
    )

    name = forms.CharField(max_length=30, help_text="The value of the X-Task-Group header. It cannot be changed.")
    owner = forms.CharField(required=False, max_length=200, help_text="Contact: a team or an address.")
    description = forms.CharField(required=False, max_length=1000)
    expected_tier1 = forms.CharField(
        required=False,
        max_length=16,
        label="Expected tier-1 prefix",
        help_text="The hash that its requests should share: 16 hex digits, as on the page of a request.",
    )
    hit_rate_objective = forms.FloatField(
        required=False,
        label="Hit-rate objective",
        help_text="Target hit rate as a ratio, such as 0.6 for 60 %.",
        widget=forms.TextInput({"inputmode": "decimal", "autocomplete": "off"}),
    )
    replicas = forms.ModelMultipleChoiceField(
        Replica.objects.none(),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="Select none to use all replicas of the pool.",
    )

    def __init__(self, pool: Pool, *args: Any, group: TaskGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, row=group, **kwargs)
        choose_from(self.fields["replicas"], pool.replicas.all())
        if group is not None:
            del self.fields["name"]
            for name in ("owner", "description", "expected_tier1", "hit_rate_objective"):
                self.initial.setdefault(name, getattr(group, name))
            if not self.is_bound:
                self.initial["replicas"] = group.replicas.all()


class PurgeForm(Form):
    """Which stored responses of a task group to remove; all if no field is filled in."""

    model = forms.CharField(required=False, max_length=300, empty_value=None, help_text="Empty: of all models.")
    namespace = forms.CharField(
        required=False,
        max_length=128,
        empty_value=None,
        strip=False,
        help_text="As requests name it in cache.namespace. Empty: of all namespaces.",
    )
    key = forms.RegexField(
        schema.CACHE_KEY_PATTERN,
        required=False,
        empty_value=None,
        error_messages={"invalid": CACHE_KEY_EXPECTED},
        help_text="Of one response: as it came in the header X-Warmpath-Cache-Key. Empty: all.",
    )
