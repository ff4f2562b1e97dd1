"""What alerts can be narrowed by, in the same words on pages and over REST."""

from __future__ import annotations

from django_filters import rest_framework as filters

from telemetry.models import Alert, AlertState, RuleKind, Severity


class AlertFilter(filters.FilterSet):
    """``?pool=NAME&state=STATE&kind=KIND&severity=SEVERITY``; times are ISO 8601."""

    pool = filters.CharFilter(field_name="pool__name")
    rule = filters.NumberFilter(field_name="rule")
    kind = filters.MultipleChoiceFilter(field_name="rule__kind", choices=RuleKind.choices)
    severity = filters.MultipleChoiceFilter(choices=Severity.choices)
    subject = filters.CharFilter(label="A replica's name.")
    acknowledged = filters.BooleanFilter(field_name="acknowledged_at", lookup_expr="isnull", exclude=True)
    muted = filters.BooleanFilter(field_name="muted", lookup_expr="isnull", exclude=True)
    state = filters.MultipleChoiceFilter(choices=AlertState.choices)
    after = filters.IsoDateTimeFilter(field_name="started_at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="started_at", lookup_expr="lt")

    class Meta:
        model = Alert
        fields = (
            "pool",
            "rule",
            "kind",
            "severity",
            "subject",
            "state",
            "acknowledged",
            "muted",
            "after",
            "before",
        )
