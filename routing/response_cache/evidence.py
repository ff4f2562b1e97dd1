"""Evidence of a semantic cache: whether the stored responses of similar requests would have been right.

Theory of operation. A check is a request that a replica answered although a similar one has a stored response. The two
responses are compared, and the check counts by the similarity of the two requests. A response is right if its text is
equal, or equal without case, whitespace and punctuation, or if the embeddings of both texts are similar enough and
both contain the same numbers: a wrong date or amount changes an embedding little.

Whether a caller's requests are served follows from the last checks of its own at or above the threshold alone: from
their number, from the lower bound of the Wilson interval of their precision, and from the precision of the most recent
``min_checks``, because all of them react too slowly to a change. Routers with a store share these checks, so that all
of them decide alike and a restart forgets none.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import StrEnum
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec

from routing.log import event
from routing.response_cache.forms import whole_of_stream
from routing.schema import ConfigError, RouterConfig, SemanticCache, SemanticMode, wilson_interval

if TYPE_CHECKING:
    from routing.response_cache.store import Store

LEAST_SIMILARITY: Final = 0.7  # of requests that are compared
WINDOW_FACTOR: Final = 5  # checks that count, per ``min_checks``
SHARED_S: Final = 30 * 86_400  # lifetime of checks in the store without another one
REFRESH_S: Final = 5.0  # between reads of the store without a check of this process's own
MAX_ANSWER_CHARS: Final = 32_768
MAX_CALLERS: Final = 256  # of a task group whose checks are in memory, at about 8 kB each by default

_words: Final = re.compile(r"[^\s.,;:!?\"'`*_()\[\]]+").findall  # signs such as - and < belong to words
_numbers: Final = re.compile(r"[-+]?\d+(?:[.,]\d+)*").findall

logger = logging.getLogger(__name__)


Counts = Counter[tuple[str, bool]]  # checks by similarity, in steps of 0.01, and whether the response was right


class State(StrEnum):
    """Whether similar requests get stored responses, and if not, why."""

    SHADOW = "shadow"  # as configured
    COLLECTING = "collecting"  # the checks do not suffice yet
    SERVING = "serving"
    STOPPED = "stopped"  # the precision of the most recent checks is below the limit


class Evidence:
    """The checks of one task group: by similarity for all callers together, and what each caller's requests showed.

    A caller is served by the checks of its own requests alone. ``name_of``: of checks in the store, by caller.
    """

    def __init__(
        self, names: tuple[str, str], settings: SemanticCache, name_of: Callable[[str], str], store: Store | None
    ) -> None:
        self.counts = Counts()  # checks of this process
        self.shared_counts: Counts | None = None  # of all routers with the store; None: unknown
        self.unshared_counts = Counts()
        self.settings = settings
        self.names = names
        self.name_of = name_of
        self.name = name_of("")  # of the checks of all callers
        self.store = store
        self._callers: OrderedDict[str, CallerEvidence] = OrderedDict()  # the most recently used last

    def configure(self, settings: SemanticCache) -> None:
        """Apply settings with the same threshold; more checks may count from now on."""
        self.settings = settings
        for caller in self._callers.values():
            caller.configure()

    def of(self, caller: str) -> CallerEvidence:
        """The evidence of a caller. With a store, one that was dropped meanwhile reads its checks again."""
        found = self._callers.get(caller)
        if found is None:
            found = self._callers[caller] = CallerEvidence(self, caller)
            if len(self._callers) > MAX_CALLERS:
                self._callers.popitem(last=False)
        self._callers.move_to_end(caller)
        return found

    @property
    def states(self) -> set[State]:
        """The states of its callers; that of a new one while there is none."""
        found = {caller.state for caller in self._callers.values()}
        return found or {State.SHADOW if self.settings.mode is SemanticMode.SHADOW else State.COLLECTING}

    @property
    def least_precise(self) -> CallerEvidence | None:
        """Of the callers with enough checks the one with the lowest precision; without any, that with most checks."""
        least = self.settings.min_checks
        return min(
            (caller for caller in self._callers.values() if caller.checks),
            key=lambda caller: (-min(caller.checks, least), caller.recent_precision),
            default=None,
        )


class CallerEvidence:
    """The checks of one caller's requests in a task group, which decide whether it is served."""

    def __init__(self, group: Evidence, caller: str) -> None:
        self._group = group
        self._caller = caller
        self._name = group.name_of(caller)
        size = WINDOW_FACTOR * group.settings.min_checks
        self._window: deque[bool] = deque(maxlen=size)  # the latest last
        self._unshared: deque[bool] = deque(maxlen=size)
        self._refresh_at = 0.0
        self._is_sharing = False
        self.state = self._current_state()

    def configure(self) -> None:
        """Apply the group's settings."""
        size = WINDOW_FACTOR * self._group.settings.min_checks
        self._window, self._unshared = deque(self._window, maxlen=size), deque(self._unshared, maxlen=size)
        self._update()

    @property
    def checks(self) -> int:
        """The checks that decide."""
        return len(self._window)

    @property
    def recent_precision(self) -> float | None:
        """The precision of the most recent checks; None before the first."""
        recent = list(self._window)[-self._group.settings.min_checks :]
        return sum(recent) / len(recent) if recent else None

    @property
    def lower_bound(self) -> float:
        """The lower bound of the precision of all checks that decide."""
        return wilson_interval(sum(self._window), len(self._window))[0]

    def record(self, similarity: float, *, is_right: bool) -> None:
        """Count a check."""
        for counts in (self._group.counts, self._group.unshared_counts):
            counts[bucket_of(similarity), is_right] += 1
        if similarity >= self._group.settings.threshold:
            self._window.append(is_right)
            self._unshared.append(is_right)
            self._update()

    # --- sharing ---

    def should_share(self) -> bool:
        """Whether the store has to be read or written now."""
        if self._group.store is None or self._is_sharing:
            return False
        return bool(self._unshared or self._group.unshared_counts) or monotonic() >= self._refresh_at

    async def share(self) -> None:
        """Write new checks to the store and read those of all routers; nothing changes if it fails."""
        group, size = self._group, self._window.maxlen or 0
        store = group.store
        if store is None or self._is_sharing:
            return
        self._is_sharing, self._refresh_at = True, monotonic() + REFRESH_S
        written = len(self._unshared)
        counted, group.unshared_counts = group.unshared_counts, Counts()  # no other caller writes them meanwhile
        counts_name = f"{group.name}:counts"
        commands: list[tuple[str | int | bytes, ...]] = [
            ("HINCRBY", counts_name, f"{similarity} {int(is_right)}", number)
            for (similarity, is_right), number in counted.items()
        ]
        if written:
            values = [int(is_right) for is_right in self._unshared]
            commands += [("RPUSH", self._name, *values), ("LTRIM", self._name, -size, -1)]
        commands += [("EXPIRE", name, SHARED_S) for name in (self._name, counts_name)]
        replies = None
        try:
            replies = await store.execute([*commands, ("HGETALL", counts_name), ("LRANGE", self._name, 0, -1)])
        finally:
            self._is_sharing = False
            if replies is None:
                group.unshared_counts += counted
        if replies is None:
            return
        for _ in range(min(written, len(self._unshared))):
            self._unshared.popleft()
        group.shared_counts = _read_counts(replies[-2])
        self._window.clear()
        self._window.extend(value == b"1" for value in replies[-1])
        self._window.extend(self._unshared)
        self._update()

    def _update(self) -> None:
        previous, self.state = self.state, self._current_state()
        if self.state is not previous and self._group.settings.mode is SemanticMode.SERVE:
            pool, group = self._group.names
            level = logging.WARNING if self.state is State.STOPPED else logging.INFO
            facts = {"caller": self._caller, "checks": self.checks, "recent_precision": self.recent_precision}
            event(logger, f"semantic_cache_{self.state}", level=level, pool=pool, group=group, **facts)

    def _current_state(self) -> State:
        settings, recent = self._group.settings, self.recent_precision
        if settings.mode is SemanticMode.SHADOW:
            return State.SHADOW
        if recent is None or self.checks < settings.min_checks:
            return State.COLLECTING
        if recent < settings.min_precision:
            return State.STOPPED
        return State.SERVING if self.lower_bound >= settings.min_precision else State.COLLECTING


def uses_semantic_caches(config: RouterConfig) -> bool:
    """Whether any task group has a semantic cache; ConfigError if it has and numpy is not installed.

    Imports what they need, which takes a fifth of a second: first called outside the event loop.
    """
    where = next(
        (
            f"$.pools[{at}].groups[{position}].semantic_cache"
            for at, pool in enumerate(config.pools)
            for position, group in enumerate(pool.groups)
            if group.semantic_cache is not None
        ),
        None,
    )
    if where is None:
        return False
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported; more threads wait for each other
    try:
        importlib.import_module("numpy")
    except ImportError:
        raise ConfigError(where, "this router lacks numpy; install warmpath[semantic]") from None
    importlib.import_module("routing.response_cache.semantic")
    return True


def _read_counts(fields: dict[bytes, bytes]) -> Counts:
    """Counts from the store, without what another release may have added."""
    counts = Counts()
    for field, number in fields.items():
        similarity, _, is_right = field.decode("ascii", "replace").partition(" ")
        if is_right in {"0", "1"} and number.isdigit():
            counts[similarity, is_right == "1"] = int(number)
    return counts


def bucket_of(similarity: float) -> str:
    """The step of 0.01 that a similarity is in, such as "0.95"."""
    return f"{min(100, int(similarity * 100 + 1e-6)) / 100:.2f}"


# --- comparing responses ---


def answer_of(path: bytes, body: bytes, *, is_stream: bool) -> str | None:
    """The text and the tool calls of a response, without its reasoning; None if it is not understood or too long."""
    try:
        whole = whole_of_stream(path, body) if is_stream else msgspec.json.decode(body)
        text = "\n".join(_texts(whole)) if isinstance(whole, dict) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return None if text is None or len(text) > MAX_ANSWER_CHARS else text


def _texts(whole: dict[str, Any]) -> list[str]:
    if whole.get("type") == "message":
        return [
            block["text"] if block["type"] == "text" else _call(block) for block in whole["content"] if _counts(block)
        ]
    texts: list[str] = []
    for choice in whole["choices"]:
        message = choice["message"]
        texts.append(message.get("content") or message.get("refusal") or "")
        texts += [_call(call["function"]) for call in message.get("tool_calls") or ()]
    return texts


def _counts(block: dict[str, Any]) -> bool:
    return block["type"] in {"text", "tool_use"}


def _call(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = msgspec.json.decode(arguments or "{}")
    parts = function.get("name"), function.get("input", arguments)
    return msgspec.json.encode(parts, order="sorted").decode()


def compare(one: str, other: str) -> bool | None:
    """Whether two answers are the same, as far as their texts tell; None if their embeddings have to tell."""
    if one == other or _words(one.casefold()) == _words(other.casefold()):
        return True
    return None if sorted(_numbers(one)) == sorted(_numbers(other)) else False
