"""``manage.py migrate``: Django's, as the owner of the database where there is one."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import migrate

from controlplane.database.roles import grant_application, owner_connection


class Command(migrate.Command):
    """Migrate, and give the application's role what it needs of what is there then."""

    def handle(self, *args: Any, **options: Any) -> None:
        """As Django's; the owner is named by ``WARMPATH_DATABASE_OWNER_URL``."""
        with owner_connection() as application:
            super().handle(*args, **options)
            if application:
                grant_application(application)
