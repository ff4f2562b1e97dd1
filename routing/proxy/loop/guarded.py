"""Methods that an event loop calls must not fail: it would only log that, and a client would wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class GivesUp(Protocol):
    """Whoever can end what it is doing because of a mistake of ours."""

    def give_up(self, error: Exception) -> None:
        """End it, and say so."""
        ...


P = ParamSpec("P")
S = TypeVar("S", bound=GivesUp)


def never_raises(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Give up where ``method`` fails."""

    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whoever waits gets an answer, whatever we did wrong
            self.give_up(error)

    guarded.__doc__ = method.__doc__
    return guarded
