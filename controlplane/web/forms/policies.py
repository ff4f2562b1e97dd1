"""How a publication comes into force, and why a rollout is moved.

Taking an earlier revision back into force.
"""

from __future__ import annotations

from typing import Any

from django import forms

from controlplane.models import RoutingPolicy
from controlplane.services.policies.rollout_plans import OBSERVE_S, SHARES, GuardLimits, Plan, RolloutPlan, make_plan
from controlplane.web.forms.base import Form, ReasonForm, Section, SectionedForm

PLANS = {
    Plan.ALL_AT_ONCE: ("All at once", "In force on every router within seconds. Nobody watches it."),
    Plan.BY_SHARE: ("By share", "Some of the prefixes first, then more of them. One prefix's requests stay together."),
    Plan.BY_ROUTER: ("Router by router", "One router that is present first, then one more with each stage."),
    Plan.BY_GROUP: ("Task group by task group", "One task group first, then one more with each stage."),
}
MOST_MINUTES = 7 * 24 * 60


class PublishForm(SectionedForm, ReasonForm):
    """Why a draft is published, by which plan, and what its guard tolerates."""

    sections = (Section("guard", GuardLimits, "What the guard tolerates", "", "the defaults"),)
    plan = forms.ChoiceField(required=False, widget=forms.RadioSelect)
    shares = forms.CharField(
        required=False,
        label="Shares before everything",
        help_text="In per cent of the prefix space, growing. For a plan by share.",
        widget=forms.TextInput({"inputmode": "decimal", "autocomplete": "off"}),
    )
    observe_min = forms.FloatField(
        required=False,
        min_value=0,
        max_value=MOST_MINUTES,
        label="Observe each stage for",
        help_text="Once every router runs it. The guard needs some minutes beside its warm-up.",
        widget=forms.TextInput({"inputmode": "decimal", "autocomplete": "off"}),
    )
    guarded = forms.BooleanField(required=False, label="A guard watches, and takes it back by itself")

    def __init__(self, policy: RoutingPolicy, *args: Any, comparable: bool = True, **kwargs: Any) -> None:
        defaults = {"plan": Plan.ALL_AT_ONCE, "guarded": True, "observe_min": f"{OBSERVE_S / 60:g}"}
        shares = ", ".join(f"{share * 100:g}" for share in SHARES)
        initial = {**defaults, "shares": shares, **(kwargs.pop("initial", None) or {})}
        super().__init__(*args, initial=initial, **kwargs)
        self.policy = policy
        known = [plan for plan in PLANS if comparable or plan is Plan.ALL_AT_ONCE]
        self.plans = [plan for plan in known if plan is not Plan.BY_GROUP or policy.group_id is None]
        field = self.fields["plan"]
        if isinstance(field, forms.ChoiceField):
            field.choices = [(str(plan), PLANS[plan][0]) for plan in self.plans]

    def plan_choices(self) -> list[tuple[str, str, str, bool]]:
        """(value, label, meaning, whether it is chosen) of each plan."""
        chosen = self["plan"].value() or Plan.ALL_AT_ONCE
        return [(str(plan), *PLANS[plan], plan == chosen) for plan in self.plans]

    def clean_shares(self) -> list[float]:
        """Ratios."""
        try:
            return [
                float(part.strip().rstrip("%")) / 100 for part in self.cleaned_data["shares"].split(",") if part.strip()
            ]
        except ValueError:
            raise forms.ValidationError("Expected numbers with commas between them, such as 5, 25.") from None

    def rollout_plan(self) -> RolloutPlan:
        """What was asked for; InvalidError where it cannot be."""
        asked = self.cleaned_data
        if (asked["plan"] or Plan.ALL_AT_ONCE) == Plan.ALL_AT_ONCE:
            return make_plan(self.policy)
        minutes = asked["observe_min"]
        return make_plan(
            self.policy,
            asked["plan"],
            guard=(asked["guard"] or {}) if asked["guarded"] else None,
            observe_s=OBSERVE_S if minutes is None else round(minutes * 60),
            shares=asked["shares"] or SHARES,
        )


class MoveForm(Form):
    """Why a rollout is moved."""

    reason = forms.CharField(
        required=False, max_length=500, label="Why", help_text="One sentence for whoever reads the rollout's steps."
    )


class RevertForm(Form):
    """Why, and the policy's name typed, so that nobody reverts the wrong one by a slip."""

    reason = forms.CharField(
        max_length=400, help_text="One sentence for whoever reads the history, such as: TTFT doubled after revision 7."
    )
    typed = forms.CharField(widget=forms.TextInput({"autocomplete": "off", "spellcheck": "false"}))
    live = forms.IntegerField(required=False, widget=forms.HiddenInput)

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name
        self.fields["typed"].label = f"Type {name} to confirm"

    def clean_typed(self) -> str:
        """Exactly the policy's name."""
        typed = str(self.cleaned_data["typed"]).strip()
        if typed != self.name:
            raise forms.ValidationError(f"This is not {self.name}. Nothing was changed.")
        return typed
