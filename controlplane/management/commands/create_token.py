"""``manage.py create_token``: a REST token for a script."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.errors import ControlPlaneError
from controlplane.models import Scope
from controlplane.services.access.tokens import create_token


class Command(BaseCommand):
    """Print a new token, the one time that it can be seen."""

    help = "Create a token for the REST API and print it. It cannot be shown again."

    def add_arguments(self, parser: CommandParser) -> None:
        """Whose, what for, what it may do, and how long."""
        parser.add_argument("username", help="the user that the token acts for")
        parser.add_argument("--name", default="command line", help="what it is for")
        parser.add_argument("--scope", choices=Scope.values, default=Scope.READ, help="write includes read, admin both")
        parser.add_argument("--days", type=int, help="days until it expires; without it, never")

    def handle(self, *_args: Any, **options: Any) -> None:
        """Create and print it; CommandError for an unknown user."""
        try:
            user = User.objects.get(username=options["username"])
        except User.DoesNotExist:
            raise CommandError(f"There is no user {options['username']!r}.") from None
        expires_at = timezone.now() + timedelta(days=options["days"]) if options["days"] is not None else None
        try:
            _, text = create_token(user, name=options["name"], scopes=[Scope(options["scope"])], expires_at=expires_at)
        except ControlPlaneError as error:
            raise CommandError(str(error)) from None
        self.stdout.write(text)
