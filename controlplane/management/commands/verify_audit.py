"""``manage.py verify_audit``: verify the audit log's chain of digests."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.services.audit_log import BrokenChainError, verify_chain


class Command(BaseCommand):
    help = "Check that no entry of the audit log was altered, added or removed; print the newest digest."

    def handle(self, *_args: Any, **_options: Any) -> None:
        try:
            count, digest = verify_chain()
        except BrokenChainError as error:
            raise CommandError(f"The audit log was tampered with. {error}") from None
        self.stdout.write(f"Entries up to {count} verified. Newest digest: {digest}")
