"""Which requests try a policy's next revision.

Theory of operation. Every prefix has a place in the prefix space, 0 to 1: a hash of its tier-1 key, seeded with the
policy's name, so that policies try different prefixes. A trial takes the places below its share. So one prefix's
requests stay together, routers and workers agree without talking, and who was tried still is when the share grows. The
key ends where the task group or pool says, else at the default boundary, and never where the policy says: a revision
that moves the boundary would otherwise choose its own requests. A prompt without an opening there goes by the default
boundary too; without a prompt there is nothing to warm, and the revision in force places the request.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.balancing.models import ServedModel
from routing.balancing.request import PlacementRequest
from routing.prompt.hashing import DEFAULT_TIER1, PrefixHasher
from routing.schema import Canary, PolicyConfig, Tier1

_SPACE: Final = 1 << 64
_word: Final = struct.Struct("<Q").pack


class Arm(StrEnum):
    """Which of a policy's two revisions places a request while one is on trial."""

    IN_FORCE = "in_force"
    TRIAL = "trial"


class ArmReason(StrEnum):
    """Why it is that one."""

    OTHER_ROUTERS = "other_routers"  # the trial names routers, and not this one
    OTHER_GROUPS = "other_groups"  # it names task groups, and not the request's
    NO_PROMPT = "no_prompt"
    BEYOND_SHARE = "beyond_share"
    WITHIN_SHARE = "within_share"


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """Which revision places a request, and why."""

    arm: Arm
    why: ArmReason
    in_force: int  # the revisions
    on_trial: int
    share: float  # of the prefix space that the trial takes
    place: float | None  # of the request in it, 0 to 1; None without a prompt


class CanaryRule:
    """Which requests of one pool or task group a policy's trial takes. ``said``: where these say that tier 1 ends."""

    __slots__ = ("_elsewhere", "_end", "_hasher", "_policy", "_seed", "_tier1", "trial")

    def __init__(
        self, policy: PolicyConfig, trial: Canary, hasher: PrefixHasher, said: Tier1 | None, *, router: str, group: str
    ) -> None:
        self.trial = trial
        self._policy = policy
        self._hasher = hasher
        self._tier1 = said or DEFAULT_TIER1
        self._seed = xxh3_64_intdigest(policy.name.encode())
        self._end = int(trial.share * _SPACE)
        self._elsewhere = _elsewhere(trial, router, group)

    @property
    def is_here(self) -> bool:
        """Whether it is meant for this router and group at all."""
        return self._elsewhere is None

    def takes(self, request: PlacementRequest, served: ServedModel) -> bool:
        """Whether the trial places a request, where it is meant to. 1.5 us for an opening of 1 KiB."""
        place = self._place(request, served)
        return place is not None and place < self._end

    def verdict(self, request: PlacementRequest, served: ServedModel) -> CanaryVerdict:
        """Which revision places a request, and why."""
        place = self._place(request, served)
        why = self._elsewhere or self._why(place)
        return CanaryVerdict(
            Arm.TRIAL if why is ArmReason.WITHIN_SHARE else Arm.IN_FORCE,
            why,
            self._policy.revision,
            self.trial.revision,
            self.trial.share,
            None if place is None else place / _SPACE,
        )

    def _why(self, place: int | None) -> ArmReason:
        if place is None:
            return ArmReason.NO_PROMPT
        return ArmReason.WITHIN_SHARE if place < self._end else ArmReason.BEYOND_SHARE

    def _place(self, request: PlacementRequest, served: ServedModel) -> int | None:
        """A request's place, in 2**64ths of the space; None without a prompt."""
        prompt, tier1 = request.prompt, self._hasher.tier1
        key = tier1(prompt, served.model, self._tier1, served.adapter)
        if key is None and self._tier1 is not DEFAULT_TIER1:
            key = tier1(prompt, served.model, DEFAULT_TIER1, served.adapter)
        return None if key is None else xxh3_64_intdigest(_word(key), self._seed)


def _elsewhere(trial: Canary, router: str, group: str) -> ArmReason | None:
    """Why a trial is not meant for a router and group; None if it is."""
    if trial.routers is not None and router not in trial.routers:
        return ArmReason.OTHER_ROUTERS
    if trial.groups is not None and group not in trial.groups:
        return ArmReason.OTHER_GROUPS
    return None
