"""The parsed request: what placement and caps read of it, and the pool, model and task group that it matches.

``reduce_body`` shrinks a body that another process parsed: texts and lists become small values for which
the caps give the same result. The prompt itself is passed on as canonical bytes.

Caps: rejects requests whose parameters ask for more than their pool or task group allows.

Engines accept several spellings of a number (vLLM reads ``"16"`` and ``16.0`` as numbers), so a capped parameter must
be a whole number here or is rejected: no value may count as more at the engine than it does here.

Matching: a pool and model by name, and a task group by rules. An alias is another name for a model or an adapter, so
prompts under both names share KV blocks. An adapter's KV blocks are its own, although its weights are mostly those of
the model that it adapts.

Task groups. The first rule that names a group of the pool decides: the header, the API key, the session key, the tier-1
prefix, the model. The order goes from what a client states on purpose to what many requests have in common. Requests
with an API key that is limited to some groups are an exception: they belong to the group that they name, else to the
key's first group, and no other rule applies. Rules that no group of a pool uses cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from routing.paths import (
    SCORED,
    CompletionBody,
    EmbeddingBody,
    Message,
    ParsedBody,
    ResponsesBody,
    ScoreBody,
)
from routing.prompt.canonical import CanonicalPrompt, canonical_prompt
from routing.prompt.hashing import DEFAULT_TIER1, PrefixHasher
from routing.prompt.parsing import Layout, omits_usage, parse_body, session_key, session_key_in
from routing.schema import (
    SESSION_FIELDS,
    Caps,
    GroupMatch,
    PolicyConfig,
    PoolConfig,
    RouterConfig,
    Settings,
    TaskGroupConfig,
    Tier1,
    Tier1Settings,
)
from routing.types import BodyError, MatchedBy, PrefixHash, TargetId, UnknownModelError

COMPLETION_TOKENS: Final = 16  # the default of max_tokens at /v1/completions

_CHOICE_FIELDS: Final = ("n", "best_of")
_LENGTH_FIELDS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MEDIA_FIELDS: Final = ("messages", "input", "previous_input_messages")
_REDUCED_MEDIA_FIELDS: Final = ("messages", "input", "query")
_LOGPROB_FIELDS: Final = ("logprobs", "top_logprobs", "prompt_logprobs")
_match_remote_url: Final = re.compile(
    r"https?://([a-z0-9.-]+)(?::[0-9]{1,5})?(?:[/?#][!-\[\]-~]*)?", re.IGNORECASE
).fullmatch


def check_caps(body: ParsedBody, caps: Caps) -> None:
    """Raise BodyError for the first parameter that exceeds its cap; it names the field and the cap."""
    for cap, fields in ((caps.n, _CHOICE_FIELDS), (caps.max_tokens, _LENGTH_FIELDS), (caps.logprobs, _LOGPROB_FIELDS)):
        if cap is not None:
            for field in fields:
                if (value := getattr(body, field)) is not None:
                    _check_number(field, value, cap)
    if caps.prompts is not None:
        _check_prompts(body, caps.prompts)
    if caps.media_hosts is not None:
        for url in media_urls(body):
            _check_media(url, caps.media_hosts)


def may_exceed_defaults(body: ParsedBody) -> bool:
    """Whether a body names a parameter that ``Caps()`` bounds: ``_CHOICE_FIELDS``, unrolled for the request path."""
    return body.n is not None or body.best_of is not None


def length_to_add(body: ParsedBody, cap: int) -> tuple[str, int] | None:
    """The parameter and value that bound a response's length, where the body has none, null or 0 (no limit)."""
    names = body.length_fields
    if not names or any(getattr(body, name) for name in names):
        return None
    if isinstance(body, CompletionBody):
        return None if body.max_tokens == 0 else (names[0], min(cap, COMPLETION_TOKENS))
    return names[0], cap


def _check_number(field: str, value: Any, cap: int) -> None:
    if not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise BodyError(field, f"expected a whole number, at most {cap} here")
    if not 0 <= value <= cap:  # a negative number means no limit
        raise BodyError(field, f"at most {cap} here")


def _check_prompts(body: ParsedBody, cap: int) -> None:
    """Check the number of prompts in all fields together; a body without such a field has one prompt, its messages."""
    fields = body.prompt_fields
    count = max(1, sum(count_prompts(getattr(body, field)) for field in fields))
    if fields and count > cap:
        raise BodyError(fields[0], f"{count} prompts in one request, at most {cap} here")


def count_prompts(value: Any) -> int:
    """Number of prompts in a field: the length of a list of texts or of token id lists, otherwise one; 0 for None."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return len(value)
    return 0 if value is None else 1


def _check_media(url: Any, hosts: tuple[str, ...]) -> None:
    if isinstance(url, str) and url[:5].lower() == "data:":
        return
    match = _match_remote_url(url) if isinstance(url, str) else None
    if match is None or match[1].lower().rstrip(".") not in hosts:
        allowed = f"data: or a host of {', '.join(hosts)}" if hosts else "data:"
        raise BodyError("messages", f"media is loaded from {allowed} only")


def media_urls(body: ParsedBody) -> Iterator[Any]:
    """Every URL in a body's messages that the engine may load, whatever the kind of part."""
    if type(body) is ScoreBody:
        for field in (*SCORED[0], *SCORED[1]):
            yield from _nested_urls(getattr(body, field))
        return
    if type(body) is EmbeddingBody and body.data is not None:
        yield body.data  # a plugin may load anything that it names
    for field in _MEDIA_FIELDS:
        if isinstance(messages := getattr(body, field, None), list):
            for message in messages:
                yield from _nested_urls(message.content if isinstance(message, Message) else message)


def _nested_urls(value: Any) -> Iterator[Any]:
    """The values of keys named ``url`` or ending in ``_url``, at any depth."""
    pending: list[tuple[Any, bool]] = [(value, False)]
    while pending:
        item, is_url = pending.pop()
        if isinstance(item, dict):
            pending += [(inner, name == "url" or name.endswith("_url")) for name, inner in item.items()]
        elif isinstance(item, list):
            pending += [(inner, is_url) for inner in item]
        elif is_url and item is not None:
            yield item


class PlacementRequest:
    """A request to be placed."""

    def __init__(
        self,
        model: str | None,
        group: str | None,
        session_key: str | None,
        prompt: CanonicalPrompt,
        tenant: str = "",
        key: str | None = None,
        key_groups: tuple[str, ...] | None = None,
        *,
        is_plain: bool = False,
        pinned: TargetId | None = None,
        is_conversation: bool = False,
    ) -> None:
        self.model = model
        self.group = group  # the task group that the client named
        self.session_key = session_key
        self.is_conversation = is_conversation  # whether that key names one conversation, unlike that of a user
        self.prompt = prompt
        self.tenant = tenant  # the salt of its API key's tenant; "" without one
        self.key = key  # the name of its API key
        self.is_plain = is_plain  # not streamed, or without tokens: its first byte does not come with the first token
        self.key_groups = key_groups  # the task groups that the key is limited to; None: all
        self.pinned = pinned  # where a response is stored that the request names; None: any replica


# Parameters that the caps read as numbers.
_NUMBER_FIELDS: Final = (
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
)
_MAX_URL_CHARS: Final = 8192  # a longer URL is rejected wherever media hosts are limited
_DENIED_URL: Final = ""  # no media host matches it
_NOT_A_NUMBER: Final = "odd"
_MAX_KEY_CHARS: Final = 256  # of a session key in a reduced body


class BodyReading:
    """One request body: its prompt, and the fields that placement and caps need."""

    def __init__(
        self,
        body: ParsedBody,
        prompt: CanonicalPrompt,
        session: str | None,
        *,
        is_plain: bool,
        omits_usage: bool,
        previous_id: str | None,
    ) -> None:
        self.body = body  # for caps; reduced if another process parsed it
        self.prompt = prompt
        self.session_key = session
        self.is_plain = is_plain  # not streamed
        self.omits_usage = omits_usage  # a stream without usage, which the router may request
        self.previous_id = previous_id  # of a stored response that the request continues
        self.layout: Layout | None = None  # set if another process parsed it


def read_body(path: str, data: bytes) -> BodyReading:
    """Parse the body of a POST to ``path``; BodyError names the field."""
    body = parse_body(path, data)
    prompt = canonical_prompt(body)
    return BodyReading(
        body,
        prompt,
        session_key(body),
        is_plain=body.stream is not True,
        omits_usage=omits_usage(body),
        previous_id=_previous_id(body) if type(body) is ResponsesBody else None,
    )


def _previous_id(body: ResponsesBody) -> str | None:
    return body.previous_response_id if type(body.previous_response_id) is str else None


def reduce_body(body: ParsedBody) -> ParsedBody:
    """A small body of the same endpoint that the caps accept or reject alike; a few hundred bytes without media."""
    reduced = type(body)(model=body.model, **{name: _reduce_number(getattr(body, name)) for name in _NUMBER_FIELDS})
    _keep_session(body, reduced)
    for field in body.prompt_fields:
        if count := count_prompts(getattr(body, field)):
            setattr(reduced, field, [""] * count)
    if urls := list(_distinct_remote_urls(media_urls(body))):
        field = next(name for name in _REDUCED_MEDIA_FIELDS if hasattr(reduced, name))
        setattr(reduced, field, [{"url": url} for url in urls])
    return reduced


def _keep_session(body: ParsedBody, reduced: ParsedBody) -> None:
    """Keep the fields that may name the session, as far as they do; a key ends after ``_MAX_KEY_CHARS``."""
    keys = {field: session_key_in(body, field) for field in SESSION_FIELDS}
    short = {field: key[:_MAX_KEY_CHARS] for field, key in keys.items() if key is not None}
    reduced.prompt_cache_key = short.get("prompt_cache_key")
    reduced.session_id = short.get("session_id")
    reduced.user = short.get("user")
    if isinstance(reduced, ResponsesBody):
        reduced.conversation = short.get("conversation")
    metadata = {"session_id": short.get("metadata.session_id")}
    if (session := short.get("metadata.user_id")) is not None:
        metadata["user_id"] = f"_session_{session}"
    if any(metadata.values()):
        reduced.metadata = metadata


def _reduce_number(value: Any) -> Any:
    """The value of a number field, or a short text in place of a huge integer or a value of another type."""
    if value is None or isinstance(value, bool | float):
        return value
    return value if isinstance(value, int) and value.bit_length() <= 64 else _NOT_A_NUMBER


def _distinct_remote_urls(urls: Iterator[Any]) -> Iterator[str]:
    """Each URL once; data URLs are left out, and all URLs that no host can allow become ``_DENIED_URL``."""
    seen: set[str] = set()
    for url in urls:
        if isinstance(url, str) and url[:5].lower() == "data:":
            continue
        distinct = url if isinstance(url, str) and len(url) <= _MAX_URL_CHARS else _DENIED_URL
        if distinct not in seen:
            seen.add(distinct)
            yield distinct


MAX_UNKNOWN: Final = 256  # cached names that are in no configuration


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a model name in a request stands for."""

    pool: PoolConfig
    name: str  # as engines know it: the model's, or the adapter's
    model: str  # "" for an engine's default model
    adapter: str = ""  # "" for none


class Models:
    """The model names of all pools of a configuration."""

    def __init__(self, config: RouterConfig) -> None:
        self._by_name = {name: served for pool in config.pools for name, served in _served_models(pool).items()}
        self._unknown: dict[str, ServedModel] = {}  # names in no configuration, served by the pool without a model list
        self._any_model = next((pool for pool in config.pools if not pool.models), None)
        default = config.pools[0] if len(config.pools) == 1 else self._any_model
        model = default.models[0] if default and default.models else ""  # like vLLM, the first of its served names
        self._default = None if default is None else ServedModel(default, model, model)

    def resolve(self, name: str | None) -> ServedModel:
        """The model with this name, else the pool that serves any model gets the request; else UnknownModelError.

        A request without a model, or with an empty name, gets the engine's default model if only one pool can be meant.
        """
        if not name:
            served = self._default
        else:
            served = self._by_name.get(name) or self._unknown.get(name) or self._resolve_unknown(name)
        if served is None:
            raise UnknownModelError(name)
        return served

    def _resolve_unknown(self, name: str) -> ServedModel | None:
        if self._any_model is None:
            return None
        if len(self._unknown) >= MAX_UNKNOWN:
            self._unknown.clear()
        served = self._unknown[name] = ServedModel(self._any_model, name, name)
        return served


def _served_models(pool: PoolConfig) -> dict[str, ServedModel]:
    """The models, adapters and aliases of a pool, by name. Aliases come last, because they refer to the others."""
    names = {model: ServedModel(pool, model, model) for model in pool.models}
    names |= {adapter.name: ServedModel(pool, adapter.name, adapter.model, adapter.name) for adapter in pool.adapters}
    aliases = {
        alias.name: names.get(alias.model) or ServedModel(pool, alias.model, alias.model) for alias in pool.aliases
    }
    return names | aliases


def policy_of(pool: PoolConfig, group: TaskGroupConfig | None) -> PolicyConfig:
    """The policy that places the requests of a task group, or of the pool itself."""
    return group.policy if group and group.policy else pool.policy


def configured_tier1(pool: PoolConfig, group: TaskGroupConfig | None) -> Tier1 | None:
    """The tier-1 boundary of the group, else of the pool; None if the policy decides."""
    return (group.tier1 if group else None) or pool.tier1


def tier1_rule(pool: PoolConfig, group: TaskGroupConfig | None, settings: Settings) -> Tier1:
    """The tier-1 boundary of the group, else of the pool, else of the policy's settings, else the default."""
    policy_tier1 = settings.tier1 if isinstance(settings, Tier1Settings) else DEFAULT_TIER1
    return configured_tier1(pool, group) or policy_tier1


class MatchedGroup(NamedTuple):
    """A request's task group (None: the pool's own requests), and the rule that matched."""

    group: TaskGroupConfig | None
    by: MatchedBy


_UNMATCHED: Final = MatchedGroup(None, MatchedBy.UNMATCHED)
_NO_RULES: Final = GroupMatch()


class TaskGroupMatcher:
    """Finds the task groups of requests, for all pools."""

    def __init__(self, config: RouterConfig, hasher: PrefixHasher) -> None:
        self._by_pool = {pool.name: _PoolGroups(pool, hasher) for pool in config.pools}

    def group_finder(self, pool: str) -> Callable[[ServedModel, PlacementRequest], MatchedGroup]:
        """The function that finds the task group of a request to this pool."""
        return self._by_pool[pool].find

    def group(self, served: ServedModel, request: PlacementRequest) -> MatchedGroup:
        """The task group of a request."""
        return self._by_pool[served.pool.name].find(served, request)

    def tier1_hashes(self, served: ServedModel, request: PlacementRequest) -> dict[str, PrefixHash | None]:
        """By task group of the pool, the hash that claims this request if it is in ``match.tier1_hashes``."""
        return self._by_pool[served.pool.name].tier1_hashes(served, request)


class _PoolGroups:
    """The task groups of one pool."""

    def __init__(self, pool: PoolConfig, hasher: PrefixHasher) -> None:
        groups = pool.groups
        self._by_name = {group.name: group for group in groups}
        self._by_key = {name: group for group in groups for name in group.match.api_keys}
        self._by_key_prefix = _PrefixMatcher(
            (prefix, group) for group in groups for prefix in group.match.api_key_prefixes
        )
        self._by_session = _PrefixMatcher(
            (prefix, group) for group in groups for prefix in group.match.session_prefixes
        )
        self._boundaries = _boundaries(pool)
        self._by_model = {model: group for group in groups for model in group.match.models}
        self._has_rules = any(group.match != _NO_RULES for group in groups)
        self._hasher = hasher

    def find(self, served: ServedModel, request: PlacementRequest) -> MatchedGroup:
        """The group that the first matching rule names."""
        named = self._by_name.get(request.group) if request.group else None
        if request.key_groups is not None:
            return self._group_of_limited_key(named, request.group, request.key_groups)
        if named is not None:
            return MatchedGroup(named, MatchedBy.HEADER)
        return self._match_rules(served, request) if self._has_rules else _UNMATCHED

    def tier1_hashes(self, served: ServedModel, request: PlacementRequest) -> dict[str, PrefixHash | None]:
        """By task group, the hash of the request's tier-1 prefix at that group's boundary."""
        rules = {group.name: boundary.rule for boundary in self._boundaries for group in boundary.groups}
        return {name: self._tier1(served, request, rule) for name, rule in rules.items()}

    def _group_of_limited_key(
        self, named: TaskGroupConfig | None, header: str | None, groups: tuple[str, ...]
    ) -> MatchedGroup:
        """The group of a request whose API key is limited to ``groups``."""
        if header:
            return MatchedGroup(named, MatchedBy.HEADER) if named is not None and named.name in groups else _UNMATCHED
        first = next((self._by_name[name] for name in groups if name in self._by_name), None)
        return _UNMATCHED if first is None else MatchedGroup(first, MatchedBy.API_KEY)

    def _match_rules(self, served: ServedModel, request: PlacementRequest) -> MatchedGroup:
        if request.key and (group := self._by_key.get(request.key) or self._by_key_prefix.longest(request.key)):
            return MatchedGroup(group, MatchedBy.API_KEY)
        if request.session_key and (group := self._by_session.longest(request.session_key)):
            return MatchedGroup(group, MatchedBy.SESSION)
        for rule, _, by_hash in self._boundaries:
            if by_hash and (group := by_hash.get(self._tier1(served, request, rule))):
                return MatchedGroup(group, MatchedBy.TIER1)
        group = self._by_model.get(request.model or served.name) or self._by_model.get(served.name)
        return MatchedGroup(group, MatchedBy.MODEL) if group else _UNMATCHED

    def _tier1(self, served: ServedModel, request: PlacementRequest, rule: Tier1) -> PrefixHash | None:
        return self._hasher.tier1(request.prompt, served.model, rule, served.adapter)


class _PrefixMatcher:
    """Task groups by a prefix of a text; the longest prefix wins."""

    def __init__(self, claims: Iterable[tuple[str, TaskGroupConfig]]) -> None:
        self._by_prefix = dict(claims)
        self._lengths = sorted({len(prefix) for prefix in self._by_prefix}, reverse=True)

    def longest(self, text: str) -> TaskGroupConfig | None:
        """The group that claims the longest prefix of a text. O(different lengths)."""
        return next((group for length in self._lengths if (group := self._by_prefix.get(text[:length]))), None)


class _BoundaryGroups(NamedTuple):
    """Task groups with the same tier-1 boundary, and the hashes that they claim."""

    rule: Tier1
    groups: list[TaskGroupConfig]
    by_hash: dict[PrefixHash | None, TaskGroupConfig]


def _boundaries(pool: PoolConfig) -> list[_BoundaryGroups]:
    """In the order of the configuration, so that a prompt is hashed once for each boundary."""
    boundaries: list[_BoundaryGroups] = []
    for group in pool.groups:
        rule = tier1_rule(pool, group, policy_of(pool, group).settings)
        boundary = next((boundary for boundary in boundaries if boundary.rule == rule), None)
        if boundary is None:
            boundaries.append(boundary := _BoundaryGroups(rule, [], {}))
        boundary.groups.append(group)
        boundary.by_hash.update({PrefixHash(int(hash_, 16)): group for hash_ in group.match.tier1_hashes})
    return boundaries
