"""Client keys, and the limits of the routers.

Pools.

Replicas.

Task groups.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.models import ClientKey, FleetSettings, Pool, Project, Replica, TaskGroup
from controlplane.web.forms.base import Form, Section, SectionedForm, Single
from routing import schema
from routing.schema import ReplicaConfig

KEY_MODELS = "Names that it is good for, one a line; a request must name one. Left empty: all of its project's."
GROUPS = "Task groups that it is good for, one a line; the first is of requests that name none. Left empty: all."


class ClientKeyForm(SectionedForm):
    """What a key is good for; a new one is of a project, and has a name."""

    singles: ClassVar = (
        Single("models", schema.ApiKey, "Models", KEY_MODELS),
        Single("groups", schema.ApiKey, "Task groups", GROUPS),
        Single("tenant", schema.ApiKey, "Tenant", empty=""),
        Single("requests_per_s", schema.ApiKey, "Requests a second"),
        Single("burst", schema.ApiKey, "Requests at once", "Left empty: a second's worth."),
        Single("tokens_per_min", schema.ApiKey, "Tokens a minute"),
    )

    expires_at = forms.DateTimeField(
        required=False,
        label="Works until",
        help_text="In UTC, such as 2031-03-04 12:00. Left empty: until it is revoked.",
    )
    name = forms.CharField(max_length=30, help_text="Who or what sends it, such as: nightly-batch.")
    project = forms.ModelChoiceField(
        Project.objects.none(),
        empty_label=None,
        help_text="It is good for this project's models and task groups alone.",
    )

    def __init__(self, *args: Any, projects: QuerySet[Project], key: ClientKey | None = None, **kwargs: Any) -> None:
        super().__init__(*args, row=key, **kwargs)
        self.fields["expires_at"].initial = key.expires_at if key else None
        field = self.fields["project"]
        if isinstance(field, forms.ModelChoiceField):
            field.queryset = projects
        if key is not None:
            del self.fields["name"], self.fields["project"]
        self.order_fields(["project", "name"])


class LimitsForm(SectionedForm):
    """What all routers accept, and how long they wait."""

    sections: ClassVar = (
        Section(
            "limits",
            schema.Limits,
            "Limits",
            "Of each process of a router. Left empty, a default holds.",
            "the routers' own",
        ),
    )

    def __init__(self, *args: Any, settings: FleetSettings, **kwargs: Any) -> None:
        super().__init__(*args, row=settings, **kwargs)


MODELS = "Served model names, one a line. Left empty, the pool takes any model."


class PoolForm(Form):
    """A new pool, of one of the projects that it may be made in."""

    project = forms.ModelChoiceField(
        Project.objects.none(), empty_label=None, help_text="Who may see and change it: people hold roles in projects."
    )

    name = forms.CharField(
        max_length=30, help_text="Lower-case letters, digits and -. It labels every figure and never changes."
    )
    models = forms.CharField(
        required=False,
        widget=forms.Textarea({"rows": 2}),
        help_text=MODELS,
    )
    description = forms.CharField(required=False, max_length=1000, help_text="What it is for, and who to ask.")

    def __init__(self, projects: QuerySet[Project], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["project"]
        if not projects.exists():
            del self.fields["project"]  # the first pool makes the first project
        elif isinstance(field, forms.ModelChoiceField):
            field.queryset = projects

    def clean_models(self) -> list[str]:
        """One name a line; empty lines do not count."""
        return [line.strip() for line in self.cleaned_data["models"].splitlines() if line.strip()]


class PoolSettingsForm(SectionedForm):
    """Everything that may be said of a pool but its name and its project."""

    sections: ClassVar = (
        Section(
            "health",
            schema.HealthCheck,
            "Health check",
            "How routers find out whether a replica answers.",
            "the routers' own",
        ),
        Section(
            "breaker",
            schema.BreakerConfig,
            "Breaker",
            "When a replica that answers its health checks is taken out all the same, and how it comes back.",
            "the routers' own",
        ),
        Section(
            "warm_up",
            schema.WarmUp,
            "Warm-up of replicas that join",
            "A replica that is new or was down first gets the openings that it will own, and then traffic.",
            "it takes traffic cold",
        ),
        Section(
            "concurrency",
            schema.ConcurrencyConfig,
            "How many requests may run at once",
            "For all requests of the pool, at each router. The others wait in the router.",
            "no limit",
        ),
        Section(
            "caps",
            schema.Caps,
            "The most that one request may ask for",
            "A request that asks for more is refused.",
            "the routers' own",
        ),
        Section(
            "tier1",
            schema.Tier1,
            "Where the tier-1 prefix ends",
            "For all of its task groups that do not say it themselves.",
            "as each policy says",
        ),
    )
    singles: ClassVar = (
        Single("models", schema.PoolConfig, "Models", MODELS, empty=[]),
        Single(
            "aliases",
            schema.PoolConfig,
            "Aliases",
            "Other names for these, one a line, as name = model. Engines are sent the model.",
            empty=[],
        ),
        Single(
            "adapters",
            schema.PoolConfig,
            "Adapters",
            "LoRA adapters that its replicas may hold, one a line, as name = the model that it adapts.",
            empty=[],
        ),
        Single("share_half_life", schema.PoolConfig, "Half-life of shares"),
        Single("stream_usage", schema.PoolConfig, "Token usage of streams"),
    )

    description = forms.CharField(required=False, max_length=1000, help_text="What it is for, and who to ask.")

    def __init__(self, *args: Any, pool: Pool, **kwargs: Any) -> None:
        super().__init__(*args, row=pool, **kwargs)
        self.initial.setdefault("description", pool.description)


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


class TaskGroupForm(SectionedForm):
    """A task group, new or changed."""

    sections: ClassVar = (
        Section(
            "match",
            schema.GroupMatch,
            "Which requests are its own",
            "Beside those that name it in X-Task-Group. Any of these is enough; what one group claims no other may.",
            "the header alone",
        ),
        Section(
            "tier1",
            schema.Tier1,
            "Where its tier-1 prefix ends",
            "The opening that its requests share, and by which they are placed.",
            "as its pool says, else the policy",
        ),
        Section(
            "auto_replicas",
            schema.AutoReplicas,
            "A share of the replicas that follows its traffic",
            "Instead of replicas ticked above. Fill in any of these, 0 will do, to turn it on.",
            "off",
        ),
        Section(
            "concurrency",
            schema.ConcurrencyConfig,
            "How many of its requests may run at once",
            "Beside the pool's own limit. The others wait in the router.",
            "no limit",
        ),
        Section(
            "caps",
            schema.GroupCaps,
            "The most that one request may ask for",
            "What is filled in stands in place of the pool's; the rest is as the pool says.",
            "as its pool says",
        ),
    )
    singles: ClassVar = (Single("priority", schema.TaskGroupConfig, "Priority", empty=0),)

    name = forms.CharField(max_length=30, help_text="What clients send in the X-Task-Group header. It never changes.")
    owner = forms.CharField(required=False, max_length=200, help_text="Who to ask: a team, an address.")
    description = forms.CharField(required=False, max_length=1000)
    expected_tier1 = forms.CharField(
        required=False,
        max_length=16,
        label="Expected tier-1 prefix",
        help_text="The hash that its requests should share, 16 hex digits, as decisions show it.",
    )
    hit_rate_objective = forms.FloatField(
        required=False,
        label="Hit-rate objective",
        help_text="A ratio that it should reach, such as 0.6 for 60 %.",
        widget=forms.TextInput({"inputmode": "decimal", "autocomplete": "off"}),
    )
    replicas = forms.ModelMultipleChoiceField(
        Replica.objects.none(),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="Tick none to use all replicas of the pool.",
    )

    def __init__(self, pool: Pool, *args: Any, group: TaskGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, row=group, **kwargs)
        field = self.fields["replicas"]
        if isinstance(field, forms.ModelMultipleChoiceField):
            field.queryset = pool.replicas.all()
        if group is not None:
            del self.fields["name"]
            for name in ("owner", "description", "expected_tier1", "hit_rate_objective"):
                self.initial.setdefault(name, getattr(group, name))
            if not self.is_bound:
                self.initial["replicas"] = group.replicas.all()
