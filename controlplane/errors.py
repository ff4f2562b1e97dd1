"""What the control plane refuses, by cause. ``api/exceptions.py`` alone turns these into statuses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


class ControlPlaneError(Exception):
    """Base of all. The text is for the person who asked: what failed, and what to do."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong in what was sent."""

    path: str  # a JSON path from the document's root, such as ``$.settings.load_factor``
    reason: str


class InvalidError(ControlPlaneError):
    """What was asked cannot be right, whatever the state of things."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.faults: tuple[Fault, ...] = (Fault(path, reason),)

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> Self:
        """Several at once, of which the first is the one that the text names."""
        error = cls(faults[0].path, faults[0].reason)
        error.faults = tuple(faults)
        return error

    def within(self, path: str, *, instead_of: str = "$") -> Self:
        """The same, of a document in which this one stands at ``path``."""
        moved = [
            Fault(path + fault.path.removeprefix(instead_of).removeprefix("$"), fault.reason) for fault in self.faults
        ]
        return self.of(moved)


class ConflictError(ControlPlaneError):
    """What was asked does not fit the present state; after a fresh look it may."""


class GoneError(ConflictError):
    """It was removed since somebody looked at it."""

    def __init__(self, noun: str) -> None:
        super().__init__(f"This {noun} was removed meanwhile.")


class NameTakenError(ConflictError):
    """Another object has this name, or this URL."""

    def __init__(self, noun: str, name: str) -> None:
        super().__init__(f"There is already a {noun} {name!r}.")


class NotUsableError(ConflictError):
    """A name or URL cannot be had, for a reason that this person may not know."""

    def __init__(self, value: str) -> None:
        super().__init__(f"{value!r} cannot be used here; choose another.")


class InUseError(ConflictError):
    """It cannot go while others rely on it."""


class NotADraftError(ConflictError):
    """Only a draft can be edited or published; somebody published or discarded this one first."""


class StaleDraftError(ConflictError):
    """The policy moved on since the editor looked at it."""


class RolloutMoveError(ConflictError):
    """A rollout's state has no such move."""


class OwnPublicationError(ControlPlaneError):
    """A publication is approved by somebody other than who made it."""


class FrozenError(ConflictError):
    """Some rows never change."""

    def __init__(self, noun: str, name: str) -> None:
        super().__init__(f"The {noun} {name} never changes; make a new one.")


class UnfinishedError(ConflictError):
    """The same request is still being worked on."""


class KeyReusedError(InvalidError):
    """A key that names one request was sent with another."""


class TooManyKeysError(ControlPlaneError):
    """Somebody uses more keys than are kept."""


class RouterAwayError(ControlPlaneError):
    """A router that is asked something does not answer as routers do."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Router {name} cannot be asked: {reason}. It serves on with what it runs.")


class DecryptionError(ControlPlaneError):
    """Something encrypted at rest cannot be read with the keys of this process."""
