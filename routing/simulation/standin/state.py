"""Where the application keeps what its handlers share."""

from __future__ import annotations

from aiohttp import web

from routing.simulation.standin.replica import Replica
from routing.simulation.standin.settings import ReplicaSettings

replica_key: web.AppKey[Replica] = web.AppKey("replica", Replica)
settings_key: web.AppKey[ReplicaSettings] = web.AppKey("settings", ReplicaSettings)
