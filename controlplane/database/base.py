"""Django's PostgreSQL backend with patient connections; settings name this package as ``ENGINE``."""

from __future__ import annotations

from typing import Any

from django.db.backends.postgresql import base
from psycopg import IsolationLevel

from controlplane.database.connection import PatientConnection


class DatabaseWrapper(base.DatabaseWrapper):
    """The same, except for who makes connections."""

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        """One of the pool's, which the settings tell what to make, or a new one where there is no pool."""
        if self.settings_dict["OPTIONS"].get("pool"):
            return super().get_new_connection(conn_params)
        self.isolation_level = IsolationLevel.READ_COMMITTED
        return PatientConnection.connect(**conn_params)
