"""Pools."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.db.models import QuerySet

from controlplane.models import Pool, Project
from routing import schema

from .base import Form
from .sections import Section, SectionedForm, Single

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
