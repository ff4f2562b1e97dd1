"""What lists can be narrowed by."""

from __future__ import annotations

from django_filters import rest_framework as filters

from telemetry.models import Alert, AlertState, Notification, NotificationState


class AlertFilter(filters.FilterSet):
    """``?pool=NAME&state=STATE``; times are ISO 8601."""

    pool = filters.CharFilter(field_name="pool__name")
    state = filters.MultipleChoiceFilter(choices=AlertState.choices)
    after = filters.IsoDateTimeFilter(field_name="started_at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="started_at", lookup_expr="lt")

    class Meta:
        model = Alert
        fields = ("pool", "state", "after", "before")


class DeliveryFilter(filters.FilterSet):
    """``?channel=NAME&state=STATE&alert=ID``."""

    channel = filters.CharFilter(field_name="channel__name")
    state = filters.ChoiceFilter(choices=NotificationState.choices)

    class Meta:
        model = Notification
        fields = ("channel", "state", "alert")
