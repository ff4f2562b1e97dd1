"""Rings in use, so that who needs the one of the same replicas gets it and builds none.

A new configuration mostly leaves names and weights alone, and a ring of many replicas takes long to build. Somebody who
keeps a ``SharedRing`` keeps its ring in use; one that nobody keeps is gone. Plain Python when the rest is compiled, for
no object of a compiled class can be referred to weakly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic
from weakref import WeakValueDictionary

from routing.balancing.hash_ring import HashRing
from routing.types import NameT


class SharedRing(Generic[NameT]):
    """A ring, for everyone who holds this."""

    __slots__ = ("__weakref__", "ring")

    def __init__(self, weights: Mapping[NameT, float]) -> None:
        self.ring = HashRing(weights)


def shared_ring(weights: Mapping[NameT, float]) -> SharedRing[NameT]:
    """The ring of these replicas, the same object for everyone who holds it at the time."""
    key = tuple(sorted(weights.items()))
    shared = _rings.get(key)
    if shared is None:
        shared = _rings[key] = SharedRing(weights)
    return shared


_rings: WeakValueDictionary[tuple[tuple[str, float], ...], SharedRing[Any]] = WeakValueDictionary()
