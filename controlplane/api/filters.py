"""What lists can be narrowed by."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
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


class PoolFilter(filters.FilterSet):
    """``?project=NAME&model=NAME``; a model that it serves by its own name."""

    project = filters.CharFilter(field_name="project__name")
    model = filters.CharFilter(method="serving")

    class Meta:
        model = Pool
        fields = ("project", "model")

    def serving(self, rows: QuerySet[Pool], _: str, model: str) -> QuerySet[Pool]:
        """Those that name the model."""
        return rows.filter(models__contains=[model])


class ReplicaFilter(filters.FilterSet):
    """``?pool=NAME&state=STATE&label=KEY=VALUE&label=KEY``; every label that is named must be there."""

    pool = filters.CharFilter(field_name="pool__name")
    state = filters.ChoiceFilter(choices=ReplicaState.choices)
    label = filters.CharFilter(method="labelled")

    class Meta:
        model = Replica
        fields = ("pool", "state", "label")

    def labelled(self, rows: QuerySet[Replica], _: str, last: str) -> QuerySet[Replica]:
        """Those that have every label; all that were named count, not the last alone."""
        asked = self.data.getlist("label") if hasattr(self.data, "getlist") else [last]
        for key, equals, value in (label.partition("=") for label in asked):
            if "\0" in key + value:  # PostgreSQL looks for no such value
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
    missing = filters.BooleanFilter(field_name="missing_since", lookup_expr="isnull", exclude=True)

    class Meta:
        model = DiscoveredReplica
        fields = ("pool", "source", "state", "missing")


class ClientKeyFilter(filters.FilterSet):
    """``?project=NAME&name=NAME&revoked=true``."""

    project = filters.CharFilter(field_name="project__name")
    revoked = filters.BooleanFilter(field_name="revoked_at", lookup_expr="isnull", exclude=True)

    class Meta:
        model = ClientKey
        fields = ("project", "name", "revoked")


class TaskGroupFilter(filters.FilterSet):
    """``?pool=NAME&name=NAME&owner=WHO``."""

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
    open = filters.BooleanFilter(method="moving")

    class Meta:
        model = Rollout
        fields = ("policy", "pool", "state", "open")

    def moving(self, rows: QuerySet[Rollout], _: str, wanted: bool) -> QuerySet[Rollout]:
        """Those that may still move, or those that ended."""
        return rows.filter(state__in=OPEN_ROLLOUTS) if wanted else rows.exclude(state__in=OPEN_ROLLOUTS)


class AuditFilter(filters.FilterSet):
    """``?actor=&kind=&project=&pool=&after=&before=``; times are ISO 8601, ``after`` included."""

    after = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt")

    class Meta:
        model = AuditEntry
        fields = ("actor", "kind", "project", "pool", "after", "before")


class OfName(filters.CharFilter):
    """Rows that belong to the one object of this name.

    The name is looked up in a subquery, not joined: so an index on (object, time) gives the newest rows in order.
    """

    def __init__(self, model: type[Model], field_name: str, *, named_by: str = "name") -> None:
        super().__init__(field_name=field_name)
        self.of, self.named_by = model, named_by  # "model" is django-filter's own word

    def filter(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Nothing is asked where no name is given; no row is of a name that nobody has."""
        if not value:
            return rows
        named = self.of._default_manager.filter(**{self.named_by: value}).values("pk")[:1]  # noqa: SLF001 - Django's name
        return rows.filter(**{f"{self.field_name}_id": Subquery(named)})


class EventFilter(filters.FilterSet):
    """``?pool=&replica=&router=&actor=&kind=&kind=&after=&before=``; times are ISO 8601, ``after`` included.

    The page of events takes the same.
    """

    pool = OfName(Pool, "pool")
    replica = OfName(Replica, "replica")
    router = OfName(Router, "router")
    actor = OfName(User, "actor", named_by="username")
    kind = filters.MultipleChoiceFilter(choices=EventKind.choices)
    after = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt")

    class Meta:
        model = Event
        fields = ("pool", "replica", "router", "actor", "kind", "after", "before")
