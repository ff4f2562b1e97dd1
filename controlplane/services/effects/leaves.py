"""A configuration as leaves: path -> value, so that whatever differs can be counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from functools import cached_property
from typing import Any

import msgspec

from routing import schema

from .effect import Path


def leaves_of(config: schema.Frozen | None) -> dict[Path, Any]:
    """Every value of a configuration, secrets included: for comparing, never for showing.

    Lists of things with names are laid out by name, so that their order and their neighbours do not matter; any other
    list is one value.
    """
    found: dict[Path, Any] = {}
    if config is not None:
        _lay_out(msgspec.to_builtins(config), (), found)
    return found


class Differences(dict[Path, tuple[Any, Any]]):
    """Leaves that are not the same, each with its value before and after."""

    def under(self, *places: Path) -> tuple[Path, ...]:
        """Those that are one of these places, or hang on one."""
        return tuple(dict.fromkeys(path for place in places for path in self._by_branch.get(place, ())))

    @cached_property
    def _by_branch(self) -> dict[Path, list[Path]]:
        found: dict[Path, list[Path]] = defaultdict(list)
        for path in self:
            for place in (*_above(path), path):
                found[place].append(path)
        return found


def differing(before: dict[Path, Any], after: dict[Path, Any]) -> Differences:
    """The leaves that are not the same, in the order of ``after``, then of ``before``; None where there is none.

    Where nothing (None) became a whole branch, or the other way round, that is one difference, at the branch.
    """
    branches = _branches(before) | _branches(after)
    found = Differences()
    for path in dict.fromkeys((*after, *before)):
        old, new = before.get(path, _MISSING), after.get(path, _MISSING)
        if old == new or (path in branches and (_is_empty(old) or _is_empty(new))):
            continue  # the same, or an empty list that got members: those differ by themselves
        place = next(
            (up for up in _above(path) if before.get(up, _MISSING) is None or after.get(up, _MISSING) is None), path
        )
        if place in branches:
            found[place] = (_below(before, place), _below(after, place))
        else:
            found[place] = (before.get(path), after.get(path))
    return found


def explained(path: Path, by: Container[Path]) -> bool:
    """Whether one of the paths is this leaf, or a branch that it hangs on; ``by`` had better be a set."""
    return path in by or any(branch in by for branch in _above(path))


_MISSING = object()


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _above(path: Path) -> Iterable[Path]:
    """The branches that a leaf hangs on, from the root."""
    return (path[:length] for length in range(1, len(path)))


def _branches(leaves: dict[Path, Any]) -> set[Path]:
    return {up for path in leaves for up in _above(path)}


def _below(leaves: dict[Path, Any], place: Path) -> Any:
    """The value at a place: a leaf's own, or a branch as leaves by the rest of their paths; None where it is not."""
    if place in leaves:
        return leaves[place]
    depth = len(place)
    return {".".join(path[depth:]): value for path, value in leaves.items() if path[:depth] == place} or None


def _lay_out(value: Any, path: Path, found: dict[Path, Any]) -> None:
    named = _by_name(value)
    if named is None:
        found[path] = value
        return
    if not named:
        found[path] = type(value)()  # something that is there and empty is not the same as nothing
    for name, inner in named.items():
        _lay_out(inner, (*path, name), found)


def _by_name(value: Any) -> dict[str, Any] | None:
    """The inner values of a branch by name; None for a leaf."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, dict) and "name" in one for one in value):
        return {str(one["name"]): one for one in value}
    return None
