"""``manage.py verify_audit``: whether the audit log is whole."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.services.audit_log import BrokenChainError, verify_chain


class Command(BaseCommand):
    """Walk the chain from the first entry to the last."""

    help = "Check that no entry of the audit log was altered, added or taken away; print the newest digest."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """CommandError, and so a status of 1, where the chain is broken."""
        try:
            count, digest = verify_chain()
        except BrokenChainError as error:
            raise CommandError(f"The audit log was tampered with. {error}") from None
        self.stdout.write(f"{count} entries, whole. Newest digest: {digest}")
