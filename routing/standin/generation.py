"""One request in the engine: its choices, their text, and what has come of them so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from routing.simulation.real_time import RealTimeEngine
from routing.simulation.sequence import Sequence, Siblings
from routing.standin.requests import Ask, Babble, block_keys, count_tokens


class Choice:
    """One answer: its tokens are known from the start, the engine says when each is there."""

    __slots__ = ("finish_reason", "generated", "index", "on_advance", "pieces", "sequence", "stop_reason")

    def __init__(self, index: int, pieces: list[str], stop_reason: str | None, sequence: Sequence) -> None:
        self.index = index
        self.pieces = pieces  # the text of each token
        self.stop_reason = stop_reason  # the stop string that ends it
        self.sequence = sequence
        self.generated = 0  # tokens
        self.finish_reason: str | None = None
        self.on_advance: Callable[[Choice, int], None] | None = None

    def advance(self, generated_tokens: int, finish_reason: str | None) -> None:
        """The engine's word: see ``real_time.Listener``."""
        before, self.generated, self.finish_reason = self.generated, generated_tokens, finish_reason
        if self.on_advance is not None:
            self.on_advance(self, before)

    @property
    def text(self) -> str:
        """What has been generated, without the stop string."""
        return "".join(self.pieces[: self.generated])


class Generation:
    """The choices of one request, submitted together and dropped together."""

    def __init__(self, ask: Ask, babble: Babble, runtime: RealTimeEngine) -> None:
        self.ask = ask
        self._runtime = runtime
        self._babble = babble
        self.choices: list[Choice] = []
        for prompt in ask.prompts:
            siblings = Siblings(ask.n)
            for variant in range(ask.n):
                self.choices.append(self._choice(prompt, variant, siblings))
        self._left = len(self.choices)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_token: Callable[[Choice, int], None] | None = None

    def _choice(self, prompt: bytes, variant: int, siblings: Siblings) -> Choice:
        config = self._runtime.engine.config
        tokens, reason = self.ask.tokens_for(prompt, variant, config.max_model_len)
        pieces = self._babble.answer(prompt, tokens, variant)
        generated = "".join(pieces).encode()
        stop = None
        if self.ask.stops:
            pieces, stop = cut_at_stop(pieces, self.ask.stops)
            reason = reason if stop is None else "stop"
        sequence = Sequence(
            keys=block_keys(prompt + generated, config.block_tokens, self.ask.salt),
            prompt_tokens=count_tokens(prompt),
            output_tokens=len(pieces),
            arrived_s=self._runtime.now(),
            finish_reason=reason,
            max_tokens=self.ask.max_tokens,
            siblings=siblings,
        )
        return Choice(len(self.choices), pieces, stop, sequence)

    def start(self, on_token: Callable[[Choice, int], None] | None = None) -> None:
        """Submit every choice. ``on_token(choice, generated before)`` hears of each step from inside the timer."""
        self._on_token = on_token
        for choice in self.choices:
            choice.on_advance = self._advance
            self._runtime.submit(choice.sequence, choice)

    async def wait(self) -> None:
        """Until every choice has ended."""
        await self._ended

    def drop(self) -> None:
        """Abort the choices that still run; also called when the client left before any was submitted."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._runtime.abort(choice.sequence)

    def end(self) -> None:
        """Let ``wait`` return, whatever is still running."""
        if not self._ended.done():
            self._ended.set_result(None)

    def _advance(self, choice: Choice, before: int) -> None:
        if self._on_token is not None:
            self._on_token(choice, before)
        if choice.finish_reason is not None:
            self._left -= 1
            if not self._left:
                self.end()

    # --- usage -----------------------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(count_tokens(prompt) for prompt in self.ask.prompts)

    @property
    def completion_tokens(self) -> int:
        """Generated so far, over all choices."""
        return sum(choice.generated for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache, of the first choice of each prompt."""
        first = self.choices[:: self.ask.n]
        return sum(choice.sequence.cached_tokens or 0 for choice in first)

    @property
    def created_cache_tokens(self) -> int:
        """Prompt tokens that this request put into the cache: whole blocks that were not there."""
        block = self._runtime.engine.config.block_tokens
        return self.prompt_tokens // block * block - self.cached_tokens if len(self.ask.prompts) == 1 else 0


def cut_at_stop(pieces: list[str], stops: tuple[str, ...]) -> tuple[list[str], str | None]:
    """The tokens up to and including the one that completes a stop string; its text ends before that string."""
    text = "".join(pieces)
    found = [(text.find(stop), stop) for stop in stops if stop and stop in text]
    if not found:
        return pieces, None
    position, stop = min(found)
    kept: list[str] = []
    start = 0
    for piece in pieces:
        kept.append(piece[: max(0, position - start)])
        start += len(piece)
        if start >= position + len(stop):
            break
    return kept, stop
