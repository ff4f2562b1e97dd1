"""The keys of one request, by which strategies place it: session, tier 1, tier 2, block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from routing.core.models import Served
from routing.core.prompt.prefix import PrefixHasher, boundary_end
from routing.core.prompt.shape import Shape, shape_of
from routing.core.request import PlacementRequest
from routing.core.token_ratio import TokenRatio
from routing.core.types import BLOCK_TOKENS, PrefixHash
from routing.schema import Tier1


class RequestKeys:
    """The keys of one request. Computed when asked; what is asked twice is kept."""

    __slots__ = (
        "_blocks",
        "_chain",
        "_hasher",
        "_request",
        "_rule",
        "_served",
        "_tier1",
        "_tier2",
        "block_tokens",
        "prompt_tokens",
        "ratio",
    )

    def __init__(
        self,
        request: PlacementRequest,
        served: Served,
        hasher: PrefixHasher,
        rule: Tier1,
        ratio: TokenRatio,
    ) -> None:
        self._request = request
        self._served = served
        self._hasher = hasher
        self._rule = rule
        self.ratio = ratio  # of the pool's model; it may move while the request is under way
        ids = request.prompt.ids
        self.block_tokens = BLOCK_TOKENS if ids else ratio.block_tokens  # of each block: estimated, or so many ids
        self.prompt_tokens = request.prompt.estimate(ratio.block_tokens)  # estimated length of the prompt
        self._tier1: PrefixHash | None = None
        self._tier2: PrefixHash | None = None
        self._blocks: list[array[int]] | None = None
        self._chain: array[int] | None = None

    @property
    def session(self) -> PrefixHash | None:
        """Key of the session, which tenants do not share; None when the request names none."""
        key, tenant = self._request.session_key, self._request.tenant
        return self._hasher.session(f"{tenant} {key}" if tenant else key) if key else None

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the prompt's opening, where the group's tier 1 ends; None when that is empty."""
        if self._tier1 is None:
            served = self._served
            self._tier1 = self._hasher.tier1(self._request.prompt, served.model, self._rule, served.adapter)
        return self._tier1

    @property
    def tier1_bytes(self) -> int:
        """Where the opening ends in the canonical prompt."""
        return boundary_end(self._request.prompt, self._rule)

    @property
    def tier1_tokens(self) -> int:
        """Estimated tokens of the opening."""
        return self.ratio.tokens(self.tier1_bytes)

    @property
    def sample_bytes(self) -> int:
        """Bytes of the prompt where its tokens may teach the ratio, else 0."""
        return self._request.prompt.sample_bytes

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: its session, else the opening and the message behind it; None without either."""
        if self._tier2 is None:
            served, prompt = self._served, self._request.prompt
            self._tier2 = self.session or self._hasher.tier2(prompt, served.model, self._rule, served.adapter)
        return self._tier2

    @property
    def blocks(self) -> list[array[int]]:
        """Chained block hashes of the prompt, in stretches that others share."""
        blocks = self._blocks
        if blocks is None:
            served = self._served
            blocks = self._blocks = self._hasher.stretches(self._request.prompt, served.model, served.adapter)
        return blocks

    @property
    def chain(self) -> Sequence[int]:
        """The same in one."""
        chain = self._chain
        if chain is None:
            chain = self._chain = array("Q", b"".join(self._blocks or self.blocks))
        return chain

    def shape(self, tools: Any) -> Shape:
        """How the prompt begins, without its text; ``tools`` as the client sent them. 1 ms: not for every request."""
        return shape_of(self._request.prompt, tools, self._request.session_key, self._hasher.digest)
