"""Errors of the control plane, by cause. ``api/exceptions.py`` alone turns them into HTTP statuses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


class ControlPlaneError(Exception):
    """Base class. The message tells the sender of the request what failed and what to do."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One invalid value in a request."""

    path: str  # a JSON path from the document's root, such as ``$.settings.slack_s``
    reason: str


class InvalidError(ControlPlaneError):
    """The request is invalid in any state of the fleet."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.faults: tuple[Fault, ...] = (Fault(path, reason),)

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> Self:
        """An error with several faults; the text names the first."""
        error = cls(faults[0].path, faults[0].reason)
        error.faults = tuple(faults)
        return error

    def within(self, path: str, *, instead_of: str = "$") -> Self:
        """The same error in a document that contains the invalid one at ``path``."""
        return self.of(
            [Fault(path + fault.path.removeprefix(instead_of).removeprefix("$"), fault.reason) for fault in self.faults]
        )


class ConflictError(ControlPlaneError):
    """The request does not fit the present state; it may succeed after a fresh GET."""


class GoneError(ConflictError):
    """The object was removed since the client read it."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"This {kind} was removed meanwhile.")


class ChangedError(ConflictError):
    """The object was changed since the user opened the form."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"This {kind} was changed since you opened this form. Look at its present values on another page, then "
            "save again to replace them, or reload."
        )


class NameTakenError(ConflictError):
    """Another object has this name, or this URL."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"There is already a {kind} {name!r}.")


class NotUsableError(ConflictError):
    """A name or URL is taken in a project that the user may not see."""

    def __init__(self, value: str) -> None:
        super().__init__(f"{value!r} cannot be used here; choose another.")


class InUseError(ConflictError):
    """The object cannot be removed while other objects depend on it."""


class NotADraftError(ConflictError):
    """Only a draft can be edited or published; this one was already published or discarded."""


class StaleDraftError(ConflictError):
    """Another revision became active since the editor read the policy."""


class PredictionRequiredError(ConflictError):
    """The draft lacks the prediction that its pool requires. ``members`` are added to the problem document."""

    def __init__(self, detail: str, members: Mapping[str, Any]) -> None:
        super().__init__(detail)
        self.members = members


class FaultedRevisionError(ConflictError):
    """An alert or an analysis named a revision with these settings; publishing them again needs a confirmation."""

    def __init__(self, detail: str, members: Mapping[str, Any]) -> None:
        super().__init__(f"{detail} Set confirm_faulted to publish its settings again.")
        self.members = members


class RolloutTransitionError(ConflictError):
    """The rollout's state has no such transition."""


class ImmutableError(ConflictError):
    """Rows of this kind never change."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"The {kind} {name} never changes; create a new one.")


class RequestInProgressError(ConflictError):
    """The first request with this idempotency key is still in progress."""


class SelfApprovalError(ControlPlaneError):
    """A publication must be approved by somebody other than its author."""


class RoleNeededError(ControlPlaneError):
    """The user may change the object, but not this field."""


class IdempotencyKeyReusedError(InvalidError):
    """An idempotency key was sent with a different request."""


class TooManyIdempotencyKeysError(ControlPlaneError):
    """A client exceeded the number of idempotency keys that are stored for it."""


class RouterUnavailableError(ControlPlaneError):
    """A router did not respond, or its response is not a router's."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Router {name} cannot be queried: {reason}. It continues with its present configuration.")


class PurgeIncompleteError(ControlPlaneError):
    """Entries of a response cache may be left. ``members`` are added to the problem document."""

    def __init__(self, detail: str, members: Mapping[str, Any]) -> None:
        super().__init__(detail)
        self.members = members


class DecryptionError(ControlPlaneError):
    """A value encrypted at rest cannot be decrypted with the keys of this process."""
