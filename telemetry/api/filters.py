"""What lists can be narrowed by."""

from __future__ import annotations

from django_filters import rest_framework as filters

from telemetry.models import AlertRule, Notification, NotificationKind, NotificationState, RuleKind


class AlertRuleFilter(filters.FilterSet):
    """``?pool=NAME&kind=KIND&enabled=true``."""

    pool = filters.CharFilter(field_name="pool__name")
    kind = filters.MultipleChoiceFilter(choices=RuleKind.choices)

    class Meta:
        model = AlertRule
        fields = ("pool", "kind", "severity", "enabled")


class DeliveryFilter(filters.FilterSet):
    """``?channel=NAME&state=STATE&kind=KIND&alert=ID``; times are ISO 8601."""

    channel = filters.CharFilter(field_name="channel__name")
    state = filters.ChoiceFilter(choices=NotificationState.choices)
    kind = filters.ChoiceFilter(choices=NotificationKind.choices)
    after = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="created_at", lookup_expr="lt")

    class Meta:
        model = Notification
        fields = ("channel", "state", "kind", "alert", "after", "before")
