"""Who may have an account."""

from allauth.account.adapter import DefaultAccountAdapter
from django.http import HttpRequest


class ClosedAccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]  # allauth ships no types
    """Nobody signs up by themselves."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:  # noqa: ARG002 - the signature is allauth's
        """Never."""
        return False
