"""Task groups."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms

from controlplane.models import Pool, Replica, TaskGroup
from routing import schema

from .sections import Section, SectionedForm, Single


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
