"""The second factor: a time-based code, and recovery codes for the day the phone is gone."""

from __future__ import annotations

from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.models import Authenticator
from django.contrib.auth.models import User

from controlplane.sealing import seal, unseal


class SecondFactorAdapter(DefaultMFAAdapter):  # type: ignore[misc]  # allauth ships no types
    """Secrets are sealed in the database; an entry in an authenticator app says the person's name."""

    def get_totp_label(self, user: User) -> str:
        """What the app shows beside the code."""
        return user.get_username()

    def encrypt(self, text: str) -> str:
        """As it is kept."""
        return seal(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        """As it is used."""
        return unseal(encrypted_text.encode()).decode()


def has_code(user: User) -> bool:
    """Whether somebody signs in with a code besides the password. One query."""
    return bool(Authenticator.objects.filter(user=user, type=Authenticator.Type.TOTP).exists())
