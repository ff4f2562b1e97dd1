"""Query parameters that filter lists."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet, Subquery
from django_filters import rest_framework as filters

from controlplane.models import (
    OPEN_ROLLOUTS,
    AuditEntry,
    ClientKey,
    DiscoveredReplica,
    DiscoveredState,
    Event,
    EventKind,
    PolicyRevision,
    Pool,
    Replica,
    ReplicaSource,
    ReplicaState,
    RevisionState,
    Rollout,
    RolloutState,
    Router,
    TaskGroup,
)


def _has_value_filter(field_name: str) -> filters.BooleanFilter:
    """Rows where a nullable column has a value, or with ``false`` those where it has none."""
    return filters.BooleanFilter(field_name=field_name, lookup_expr="isnull", exclude=True)


class _InstantField(filters.IsoDateTimeFilter.field_class):
    """A time, in UTC because PostgreSQL refuses offsets of 16 hours and more."""

    def to_python(self, value: str) -> datetime | None:
        at: datetime | None = super().to_python(value)
        try:
            return None if at is None else at.astimezone(UTC)
        except OverflowError:
            raise ValidationError(self.error_messages["invalid"], code="invalid") from None


class InstantFilter(filters.IsoDateTimeFilter):
    field_class = _InstantField


class PoolFilter(filters.FilterSet):
    """``?project=NAME&model=NAME``; a model by its own name, not an alias."""

    project = filters.CharFilter(field_name="project__name")
    model = filters.CharFilter(method="filter_model")

    class Meta:
        model = Pool
        fields = ("project", "model")

    def filter_model(self, rows: QuerySet[Pool], _: str, model: str) -> QuerySet[Pool]:
        return rows.filter(models__contains=[model])


class ReplicaFilter(filters.FilterSet):
    """``?pool=NAME&state=STATE&label=KEY=VALUE&label=KEY``; a replica must have every given label."""

    pool = filters.CharFilter(field_name="pool__name")
    state = filters.ChoiceFilter(choices=ReplicaState.choices)
    label = filters.CharFilter(method="filter_labels")

    class Meta:
        model = Replica
        fields = ("pool", "state", "label")

    def filter_labels(self, rows: QuerySet[Replica], _: str, last_label: str) -> QuerySet[Replica]:
        """Reads all values of the parameter; django-filter passes the last one only."""
        labels = self.data.getlist("label") if hasattr(self.data, "getlist") else [last_label]
        for key, equals, value in (label.partition("=") for label in labels):
            if "\0" in key + value:  # PostgreSQL raises for a NUL
                return rows.none()
            rows = rows.filter(labels__contains={key: value}) if equals else rows.filter(labels__has_key=key)
        return rows


class SourceFilter(filters.FilterSet):
    """``?pool=NAME&kind=KIND``."""

    pool = filters.CharFilter(field_name="pool__name")

    class Meta:
        model = ReplicaSource
        fields = ("pool", "kind")


class DiscoveredReplicaFilter(filters.FilterSet):
    """``?pool=NAME&source=NAME&state=STATE&missing=BOOL``."""

    pool = filters.CharFilter(field_name="source__pool__name")
    source = filters.CharFilter(field_name="source__name")
    state = filters.ChoiceFilter(choices=DiscoveredState.choices)
    missing = _has_value_filter("missing_since")

    class Meta:
        model = DiscoveredReplica
        fields = ("pool", "source", "state", "missing")


class ClientKeyFilter(filters.FilterSet):
    """``?project=NAME&name=NAME&revoked=true``."""

    project = filters.CharFilter(field_name="project__name")
    revoked = _has_value_filter("revoked_at")

    class Meta:
        model = ClientKey
        fields = ("project", "name", "revoked")


class TaskGroupFilter(filters.FilterSet):
    """``?pool=NAME&name=NAME&owner=NAME``."""

    pool = filters.CharFilter(field_name="pool__name")

    class Meta:
        model = TaskGroup
        fields = ("pool", "name", "owner")


class RevisionFilter(filters.FilterSet):
    """``?policy=NAME&state=STATE&author=NAME&strategy=NAME``."""

    policy = filters.CharFilter(field_name="policy__name")
    state = filters.ChoiceFilter(choices=RevisionState.choices)
    author = filters.CharFilter(field_name="author__username")
    strategy = filters.CharFilter(field_name="settings__strategy")

    class Meta:
        model = PolicyRevision
        fields = ("policy", "state", "author", "strategy")


class RolloutFilter(filters.FilterSet):
    """``?policy=NAME&pool=NAME&state=STATE&state=STATE&open=true``."""

    policy = filters.CharFilter(field_name="revision__policy__name")
    pool = filters.CharFilter(field_name="revision__policy__pool__name")
    state = filters.MultipleChoiceFilter(choices=RolloutState.choices)
    open = filters.BooleanFilter(method="filter_open")

    class Meta:
        model = Rollout
        fields = ("policy", "pool", "state", "open")

    def filter_open(self, rows: QuerySet[Rollout], _: str, is_open: bool) -> QuerySet[Rollout]:
        return rows.filter(state__in=OPEN_ROLLOUTS) if is_open else rows.exclude(state__in=OPEN_ROLLOUTS)


class TimeFilter(filters.FilterSet):
    """``?after=&before=``, times in ISO 8601; ``after`` is inclusive."""

    after = InstantFilter(field_name="at", lookup_expr="gte")
    before = InstantFilter(field_name="at", lookup_expr="lt")


class AuditFilter(TimeFilter):
    """``?actor=&kind=&project=&pool=&after=&before=``."""

    class Meta:
        model = AuditEntry
        fields = ("actor", "kind", "project", "pool", "after", "before")


class NameFilter(filters.CharFilter):
    """Rows that refer to the object of this name.

    The name is looked up in a subquery instead of a join, so that an index on (object, time) serves the newest rows.
    """

    def __init__(self, model: type[Model], field_name: str, *, name_field: str = "name") -> None:
        super().__init__(field_name=field_name)
        self.related_model, self.name_field = model, name_field

    def filter(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        if not value:
            return rows
        related = self.related_model._default_manager.filter(**{self.name_field: value}).values("pk")[:1]  # noqa: SLF001 - Django's name
        return rows.filter(**{f"{self.field_name}_id": Subquery(related)})


class EventFilter(TimeFilter):
    """``?pool=&replica=&router=&actor=&kind=&kind=&after=&before=``. The page of events has the same filters."""

    pool = NameFilter(Pool, "pool")
    replica = NameFilter(Replica, "replica")
    router = NameFilter(Router, "router")
    actor = NameFilter(User, "actor", name_field="username")
    kind = filters.MultipleChoiceFilter(choices=EventKind.choices)

    class Meta:
        model = Event
        fields = ("pool", "replica", "router", "actor", "kind", "after", "before")
