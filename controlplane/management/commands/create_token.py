"""``manage.py create_token``: a REST token for a script."""

from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.errors import ControlPlaneError
from controlplane.management import existing_user
from controlplane.models import Scope
from controlplane.services.access.tokens import create_token


class Command(BaseCommand):
    help = "Create a token for the REST API and print it. It cannot be shown again."
    requires_system_checks = ()  # they import every page, which takes a second

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("username", help="the user that the token acts for")
        parser.add_argument("--name", default="command line", help="what it is for")
        parser.add_argument("--scope", choices=Scope.values, default=Scope.READ, help="write includes read, admin both")
        parser.add_argument("--days", type=int, help="days until it expires; without it, never")

    def handle(self, *_args: Any, **options: Any) -> None:
        user = existing_user(options["username"])
        expires_at = timezone.now() + timedelta(days=options["days"]) if options["days"] is not None else None
        try:
            _, text = create_token(user, name=options["name"], scopes=[Scope(options["scope"])], expires_at=expires_at)
        except ControlPlaneError as error:
            raise CommandError(str(error)) from None
        self.stdout.write(text)
