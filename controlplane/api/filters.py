"""What lists can be narrowed by."""

from __future__ import annotations

from django_filters import rest_framework as filters

from controlplane.models import (
    AuditEntry,
    Event,
    EventKind,
    PolicyRevision,
    Replica,
    ReplicaState,
    RevisionState,
    Rollout,
    RolloutState,
    TaskGroup,
)


class ReplicaFilter(filters.FilterSet):
    """``?pool=NAME&state=STATE``."""

    pool = filters.CharFilter(field_name="pool__name")
    state = filters.ChoiceFilter(choices=ReplicaState.choices)

    class Meta:
        model = Replica
        fields = ("pool", "state")


class TaskGroupFilter(filters.FilterSet):
    """``?pool=NAME&name=NAME``."""

    pool = filters.CharFilter(field_name="pool__name")

    class Meta:
        model = TaskGroup
        fields = ("pool", "name")


class RevisionFilter(filters.FilterSet):
    """``?policy=NAME&state=STATE``."""

    policy = filters.CharFilter(field_name="policy__name")
    state = filters.ChoiceFilter(choices=RevisionState.choices)

    class Meta:
        model = PolicyRevision
        fields = ("policy", "state")


class RolloutFilter(filters.FilterSet):
    """``?policy=NAME&state=STATE``."""

    policy = filters.CharFilter(field_name="revision__policy__name")
    state = filters.ChoiceFilter(choices=RolloutState.choices)

    class Meta:
        model = Rollout
        fields = ("policy", "state")


class AuditFilter(filters.FilterSet):
    """``?actor=&kind=&project=&pool=&after=&before=``; times are ISO 8601, ``after`` included."""

    after = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt")

    class Meta:
        model = AuditEntry
        fields = ("actor", "kind", "project", "pool", "after", "before")


class EventFilter(filters.FilterSet):
    """``?pool=&replica=&router=&kind=&kind=&after=&before=``; times are ISO 8601, ``after`` included."""

    pool = filters.CharFilter(field_name="pool__name")
    replica = filters.CharFilter(field_name="replica__name")
    router = filters.CharFilter(field_name="router__name")
    kind = filters.MultipleChoiceFilter(choices=EventKind.choices)
    after = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt")

    class Meta:
        model = Event
        fields = ("pool", "replica", "router", "kind", "after", "before")
