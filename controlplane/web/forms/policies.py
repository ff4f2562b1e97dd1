"""Forms that publish a draft, change the state of a rollout and revert a policy."""

from __future__ import annotations

from typing import Any

from django import forms

from controlplane.models import PolicyRevision
from controlplane.services.policies.lifecycle import fault_text, faulted_revision
from controlplane.services.policies.rollout_plans import OBSERVE_S, SHARES, GuardLimits, Plan, RolloutPlan, make_plan
from controlplane.web.forms.base import DEFAULTS_APPLY, Form, Section, SectionedForm

PLANS = {  # label, description
    Plan.ALL_AT_ONCE: ("All at once", "Active on every router within seconds, without a canary."),
    Plan.BY_SHARE: (
        "By share of prefixes",
        "First some of the prompt prefixes, then more. All requests with one prefix use the same revision.",
    ),
    Plan.BY_ROUTER: ("Router by router", "First one router, then one more with each step."),
    Plan.BY_GROUP: ("Task group by task group", "First one task group, then one more with each step."),
}
MAX_MINUTES = 7 * 24 * 60
_DECIMAL = {"inputmode": "decimal", "autocomplete": "off"}


class FaultConfirmation(Form):
    """Asks once more before settings are published that an alert or an analysis named."""

    def add_confirmation(self, revision: PolicyRevision) -> None:
        """Add the checkbox where the revision's settings are those of a faulty one."""
        if (faulty := faulted_revision(revision.policy, revision.digest)) is not None:
            self.fields["confirm_faulted"] = forms.BooleanField(
                label="Publish these settings again",
                help_text=fault_text(faulty),
                error_messages={"required": "Confirm that these settings are to be published again."},
            )


class PublishForm(FaultConfirmation, SectionedForm):
    """The reason of a publication, its rollout plan and the limits of its analysis."""

    sections = (Section("guard", GuardLimits, "Thresholds", "", DEFAULTS_APPLY),)
    reason = forms.CharField(
        max_length=500, help_text="One sentence for the history, such as: agents share a long system prompt."
    )
    digest = forms.CharField(widget=forms.HiddenInput, required=False)
    override_reason = forms.CharField(
        required=False,
        max_length=500,
        label="Reason to publish anyway",
        help_text="Recorded in the audit log and shown with the rollout.",
    )
    plan = forms.ChoiceField(required=False, widget=forms.RadioSelect)
    shares = forms.CharField(
        required=False,
        label="Canary shares",
        help_text="Percentages of the prompt prefixes, ascending, such as 5, 25. Only for the plan by share.",
        widget=forms.TextInput(_DECIMAL),
    )
    observe_min = forms.FloatField(
        required=False,
        min_value=0,
        max_value=MAX_MINUTES,
        label="Duration of each step",
        help_text="Counted from when every router runs the step. The analysis needs some minutes after warm-up.",
        widget=forms.TextInput(_DECIMAL),
    )
    guarded = forms.BooleanField(required=False, label="Analyze the canary, and roll back automatically if it is worse")

    def __init__(self, draft: PolicyRevision, *args: Any, comparable: bool = True, **kwargs: Any) -> None:
        """``comparable`` is whether there is an active revision to compare a canary with."""
        defaults = {"plan": Plan.ALL_AT_ONCE, "guarded": True, "observe_min": f"{OBSERVE_S / 60:g}"}
        shares = ", ".join(f"{share * 100:g}" for share in SHARES)
        initial = {**defaults, "shares": shares, **(kwargs.pop("initial", None) or {})}
        super().__init__(*args, initial=initial, **kwargs)
        self.policy = policy = draft.policy
        self.add_confirmation(draft)
        possible = [plan for plan in PLANS if comparable or plan is Plan.ALL_AT_ONCE]
        self.plans = [plan for plan in possible if plan is not Plan.BY_GROUP or policy.group_id is None]
        field = self.fields["plan"]
        if isinstance(field, forms.ChoiceField):
            field.choices = [(str(plan), PLANS[plan][0]) for plan in self.plans]

    def plan_choices(self) -> list[tuple[str, str, str, bool]]:
        """(value, label, description, whether it is selected) of each plan."""
        selected = self["plan"].value() or Plan.ALL_AT_ONCE
        return [(str(plan), *PLANS[plan], plan == selected) for plan in self.plans]

    def clean_shares(self) -> list[float]:
        """Percentages as ratios."""
        parts = [part.strip().rstrip("%") for part in self.cleaned_data["shares"].split(",") if part.strip()]
        try:
            return [float(part) / 100 for part in parts]
        except ValueError:
            raise forms.ValidationError("Expected numbers separated by commas, such as 5, 25.") from None

    def rollout_plan(self) -> RolloutPlan:
        """The plan as filled in; InvalidError if it is impossible."""
        values = self.cleaned_data
        if (values["plan"] or Plan.ALL_AT_ONCE) == Plan.ALL_AT_ONCE:
            return make_plan(self.policy)
        minutes = values["observe_min"]
        return make_plan(
            self.policy,
            values["plan"],
            guard=(values["guard"] or {}) if values["guarded"] else None,
            observe_s=OBSERVE_S if minutes is None else round(minutes * 60),
            shares=values["shares"] or SHARES,
        )


class ReasonForm(Form):
    """The optional reason of a rollout transition."""

    reason = forms.CharField(required=False, max_length=500, help_text="One sentence for the rollout's history.")


class RevertForm(FaultConfirmation):
    """The reason, and a confirmation for a faulty revision."""

    reason = forms.CharField(
        max_length=400, help_text="One sentence for the history, such as: TTFT doubled after revision 7."
    )
    live = forms.IntegerField(required=False, widget=forms.HiddenInput)

    def __init__(self, earlier: PolicyRevision, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_confirmation(earlier)
