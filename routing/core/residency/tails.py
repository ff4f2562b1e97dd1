"""What a replica's cache holds behind a prompt's last whole block: the rest of the prompt, and the generated tokens.

Theory of operation. Chains end with the last whole block of a prompt, and the router hashes no responses. Engines keep
both: the generated tokens take room as all others do, and a conversation's next turn finds them. A *tail* stands for
them, one for each chain and its holders: a run of its own, found by the chain's last hash and evicted before it. It is
entered empty with the prompt and gets its length when the response reports its tokens.

Whether the next turn really begins with what was generated depends on the client and the tokenizer, so ``TailReuse``
learns it: the share of tails that was found in the cache by the prompts that went on behind their chains. Predictions
count that share. A tail that was found is dropped, for the longer chain stands for the same tokens now.

Where prompts part, as behind a system prompt, they share a part of the next block too, and no tail stands there. How
many tokens were found behind such a place is remembered (``Branches``).
"""

from __future__ import annotations

from typing import Final

from routing.core.residency.runs import Chain, Run

MEMORY: Final = 64  # samples that count
MAX_BRANCHES: Final = 4096  # places remembered at least, and twice as many at most
MOST_BLOCKS: Final = 1.5  # that prompts share behind a block where they part, the template's tokens included
MOST_DENSER: Final = 0.5  # share of a prefix's estimate that it may have more tokens than other texts of as many bytes

_TAIL: Final = 0x9E37_79B9_7F4A_7C15  # tells a tail's key from its chain's last hash


class Tail(Run):
    """The tokens behind a chain; ``length`` is in blocks, as of any run."""

    __slots__ = ("tokens",)

    def __init__(self, key: int) -> None:
        super().__init__((key,), key, 0, 0)
        self.tokens = 0  # estimated, in the scale of prompts' estimates


class TailReuse:
    """How much of tails the next turns found, 0 to 1."""

    __slots__ = ("_samples", "ratio")

    def __init__(self) -> None:
        self.ratio = 0.0
        self._samples = 0

    def learn(self, found_ratio: float) -> None:
        """Take in what one turn found of the tail before it; below 0 counts as 0, above 1 as 1."""
        self._samples = min(self._samples + 1, MEMORY)
        self.ratio += (min(max(found_ratio, 0.0), 1.0) - self.ratio) / self._samples


class Branches:
    """Places where prompts part: the tokens that they share behind their last common block."""

    __slots__ = ("_fading", "_tokens")

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # by the hash of that block
        self._fading: dict[int, int] = {}  # the generation before

    def learn(self, hash_: int, found_tokens: float, held_tokens: int, block_tokens: int) -> None:
        """So many tokens more were cached than the ``held_tokens`` that were estimated up to a block; or fewer.

        Far more come from a longer prefix that was taken to be evicted.
        """
        if found_tokens <= MOST_BLOCKS * block_tokens + MOST_DENSER * held_tokens:
            self._tokens[hash_] = int(found_tokens)
            if len(self._tokens) >= MAX_BRANCHES:
                self._fading, self._tokens = self._tokens, {}

    def tokens(self, hash_: int) -> int:
        """What to expect behind a block; 0 where nothing is known."""
        found = self._tokens.get(hash_)
        return self._fading.get(hash_, 0) if found is None else found


def tail_key(chain: Chain, blocks: int) -> int:
    """Where the tail is found of a prompt whose chain ends after so many blocks (>= 1)."""
    return chain[blocks - 1] ^ _TAIL


def tail_tokens(run: Run) -> int:
    """A tail's tokens; 0 of any other run, whose first hash happens to be a tail's key."""
    return run.tokens if isinstance(run, Tail) else 0
