"""Shares hash rings between users with the same replicas and weights, so that each ring is built once.

A new configuration rarely changes names and weights, and a ring of many replicas takes long to build. A ring is dropped
when no ``SharedRing`` of it is in use any more. This module is not compiled, because compiled classes do not support
weak references.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic
from weakref import WeakValueDictionary

from routing.balancing.hash_ring import HashRing
from routing.types import NameT


class SharedRing(Generic[NameT]):
    """Keeps a ring in use."""

    def __init__(self, weights: Mapping[NameT, float]) -> None:
        self.ring = HashRing(weights)


def shared_ring(weights: Mapping[NameT, float]) -> SharedRing[NameT]:
    """The ring of these replicas, the same object for all current users."""
    key = tuple(sorted(weights.items()))
    shared = _rings.get(key)
    if shared is None:
        shared = _rings[key] = SharedRing(weights)
    return shared


_rings: WeakValueDictionary[tuple[tuple[str, float], ...], SharedRing[Any]] = WeakValueDictionary()
