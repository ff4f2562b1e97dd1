"""What the control plane knows, one noun per file. Only ``services`` write these rows."""

from .api_token import ApiToken, Scope
from .audit_check import AuditCheck
from .audit_entry import AuditEntry
from .client_key import ClientKey
from .config_snapshot import ConfigSnapshot
from .discovered_replica import DiscoveredReplica, DiscoveredState, TargetCondition
from .event import Event, EventKind
from .fleet_secret import FleetSecret
from .fleet_settings import FleetSettings
from .item_failure import ItemFailure, PeriodicTask
from .kept_answer import KeptAnswer
from .person_session import PersonSession
from .policy import PolicyRevision, RevisionState, RoutingPolicy
from .pool import Pool
from .project import Project
from .replica import Replica, ReplicaState
from .role import Role, RoleAssignment
from .rollout import OPEN_ROLLOUTS, HeldBy, Rollout, RolloutState, RolloutStep
from .router import Router
from .router_report import RouterReport
from .sign_in_lock import SignInLock
from .source import Adoption, ReplicaSource, SourceStatus
from .task_group import TaskGroup
from .worker_liveness import WorkerLiveness

__all__ = [
    "OPEN_ROLLOUTS",
    "Adoption",
    "ApiToken",
    "AuditCheck",
    "AuditEntry",
    "ClientKey",
    "ConfigSnapshot",
    "DiscoveredReplica",
    "DiscoveredState",
    "Event",
    "EventKind",
    "FleetSecret",
    "FleetSettings",
    "HeldBy",
    "ItemFailure",
    "KeptAnswer",
    "PeriodicTask",
    "PersonSession",
    "PolicyRevision",
    "Pool",
    "Project",
    "Replica",
    "ReplicaSource",
    "ReplicaState",
    "RevisionState",
    "Role",
    "RoleAssignment",
    "Rollout",
    "RolloutState",
    "RolloutStep",
    "Router",
    "RouterReport",
    "RoutingPolicy",
    "Scope",
    "SignInLock",
    "SourceStatus",
    "TargetCondition",
    "TaskGroup",
    "WorkerLiveness",
]
