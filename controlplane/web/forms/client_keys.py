"""Client keys, and the limits of the routers."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.db.models import QuerySet

from controlplane.models import ClientKey, FleetSettings, Project
from routing import schema

from .sections import Section, SectionedForm, Single

MODELS = "Names that it is good for, one a line; a request must name one. Left empty: all of its project's."
GROUPS = "Task groups that it is good for, one a line; the first is of requests that name none. Left empty: all."


class ClientKeyForm(SectionedForm):
    """What a key is good for; a new one is of a project, and has a name."""

    singles: ClassVar = (
        Single("models", schema.ApiKey, "Models", MODELS),
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
