"""Replicas, pools and task groups, ``RouterConfig``, the root of a configuration, and its numbered snapshots.

A request belongs to the first task group that one of these rules names, in this order: the header ``X-Task-Group``, the
API key, the session key, the tier-1 prefix, the model. Rules that a client triggers on purpose come before
rules that many requests match. Two groups of a pool must not claim the same value.

A ``Snapshot`` is an envelope that keeps ``config`` as raw bytes. The schema number is read before the config,
and ``sha256`` is the digest of exactly those bytes, so that two releases which would encode a config differently agree
on its digest. ``load_snapshot`` checks the envelope, the schema number, the digest, the types of the config and then
the rules that types cannot express; the first problem is a ``ConfigError`` that names the path.

The signature is Ed25519 (RFC 8032). A router needs the public key alone, so the secrets on a router's host do not
suffice to publish a configuration to other routers. The signature covers every field of the envelope: ``config`` by its
digest, and itself without ``value``. This module contains no cryptography; callers pass functions that sign and verify.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from routing.paths import DataPath
from routing.schema.access import Access, check_access
from routing.schema.fields import (
    REMOVED_FIELDS,
    AddressRules,
    ConfigError,
    Frozen,
    Hex,
    Model,
    Name,
    ReplicaNetworks,
    check_base_url,
    decode,
    matching,
    number,
    without_removed,
)
from routing.schema.limits import (
    LEAST_URGENT,
    MAX_OBJECTIVE_MS,
    BreakerConfig,
    Caps,
    ConcurrencyConfig,
    GroupCaps,
    HealthCheck,
    Limits,
    WarmUp,
)
from routing.schema.requests import (
    MAX_ORIGINS,
    Origin,
    SessionKey,
    check_origins,
    check_paths,
    check_session_keys,
)
from routing.schema.response_cache import ResponseCache, SemanticCache
from routing.schema.ring import MAX_ON_RING
from routing.schema.strategies import AffinitySettings, PolicyConfig, Settings, Tier1

Tier1Hash = Annotated[str, matching(r"[0-9a-f]{16}")]  # as decisions and /admin/explain show it
NamePrefix = Annotated[str, matching(r"[a-z0-9][a-z0-9._-]{0,62}")]
SessionPrefix = Annotated[str, Meta(min_length=1, max_length=256)]


class GroupMatch(Frozen, frozen=True):
    """Rules that put a request into a task group without ``X-Task-Group``. Any one of them is enough."""

    api_keys: Annotated[tuple[Name, ...], Meta(description="The name of its API key.")] = ()
    api_key_prefixes: Annotated[
        tuple[NamePrefix, ...], Meta(description="A prefix of its API key's name; the longest match wins.")
    ] = ()
    session_prefixes: Annotated[
        tuple[SessionPrefix, ...], Meta(description="A prefix of its session key; the longest match wins.")
    ] = ()
    tier1_hashes: Annotated[
        tuple[Tier1Hash, ...],
        Meta(description="The hash of its tier-1 prefix at this group's boundary, as decisions show it."),
    ] = ()
    models: Annotated[tuple[Model, ...], Meta(description="The model, alias or adapter that it names.")] = ()


class TaskGroupConfig(Frozen, frozen=True):
    """Requests with one purpose. Requests of no group use the pool's own policy."""

    name: Name
    policy: PolicyConfig | None = None  # None: the pool's
    replicas: tuple[Name, ...] | None = None  # the pool's replicas that the group may use; None: all
    caps: GroupCaps | None = None  # None: the pool's
    concurrency: ConcurrencyConfig | None = None  # in addition to the pool's; None: no limit
    priority: Annotated[
        int,
        Meta(
            ge=0,
            le=LEAST_URGENT,
            description="Priority in the queue, 0 first; X-Priority may only lower a request's priority.",
        ),
    ] = 0
    ttft_objective_ms: (
        Annotated[
            int,
            number(
                "ms",
                1,
                MAX_OBJECTIVE_MS,
                "TTFT that its requests should have; X-TTFT-Objective-Ms of a request replaces it. Empty: none.",
            ),
        ]
        | None
    ) = None
    match: GroupMatch = GroupMatch()
    tier1: Tier1 | None = None  # boundary of its tier-1 prefix; None: the pool's, else the policy's
    response_cache: ResponseCache | None = None  # None: no response is served twice
    semantic_cache: SemanticCache | None = None  # None: only identical requests get a stored response


class Alias(Frozen, frozen=True):
    """Another name for a model or an adapter of the same pool; engines receive the name that it stands for."""

    name: Model
    model: Model


class Adapter(Frozen, frozen=True):
    """A LoRA adapter that clients name as their model. Its KV blocks are not shared with its model's."""

    name: Model
    model: Model  # the model that it adapts


class ModelNames(Frozen, frozen=True):
    """Every model name that one pool serves."""

    models: tuple[Model, ...]
    aliases: tuple[Alias, ...]
    adapters: tuple[Adapter, ...]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Each name, with its JSON path in the pool."""
        for index, model in enumerate(self.models):
            yield model, f"models[{index}]"
        for index, alias in enumerate(self.aliases):
            yield alias.name, f"aliases[{index}].name"
        for index, adapter in enumerate(self.adapters):
            yield adapter.name, f"adapters[{index}].name"


class ReplicaState(StrEnum):
    """The state that an operator sets for a replica; health checks find out whether it responds."""

    ACTIVE = "active"
    DRAINING = "draining"  # running requests finish, new ones go to other replicas
    DISABLED = "disabled"  # not even health-checked


class ReplicaRole(StrEnum):
    """Which phase of a request a replica computes, where prefill and decode are separated."""

    BOTH = "both"  # requests of clients
    PREFILL = "prefill"  # prompts of requests that a replica of another role continues
    DECODE = "decode"  # the same requests as ``both``; its prompts usually come from a prefill replica


class Disaggregation(Frozen, frozen=True):
    """When a prompt is prefilled by a replica with the role ``prefill``."""

    # A transfer costs a second request and moves the KV blocks of the whole prompt. 2048 tokens are one chunk of vLLM's
    # chunked prefill, so shorter prompts delay the running streams by one step. NVIDIA Dynamo has the same default.
    min_uncached_tokens: Annotated[
        int,
        number(
            "tokens",
            0,
            10_000_000,
            "Prompts with at least this many tokens that the decode replica has not cached go to a prefill replica.",
        ),
    ] = 2048


class StreamUsage(StrEnum):
    """Whether a router asks engines for the token usage of streamed responses whose clients did not ask."""

    REQUEST = "request"  # with ``stream_options.include_usage``; the extra chunk is removed from the stream
    AS_SENT = "as_sent"  # requests and streams pass unchanged


class StreamFailure(StrEnum):
    """What a router does about a stream whose replica fails."""

    CONTINUE = "continue"  # another replica generates the rest; where that cannot be, the stream ends
    END = "end"  # with an error event


def _zmq_endpoint(description: str) -> Meta:
    form = "tcp://host:port with the host that routers connect to, such as tcp://gpu-1:5557"
    return matching(r"tcp://[^\s/@?#*]+:[0-9]{1,5}", form=form, max_length=300, description=description)


class KvEvents(Frozen, frozen=True):
    """Where an engine publishes its KV cache events: ``--kv-events-config`` of vLLM, with an endpoint that binds."""

    endpoint: Annotated[
        str,
        _zmq_endpoint(
            "Where the engine publishes events, as routers reach it, such as tcp://gpu-1:5557; data-parallel rank r "
            "has the port plus r."
        ),
    ]
    replay_endpoint: (
        Annotated[
            str,
            _zmq_endpoint(
                "Where routers request lost events again, such as tcp://gpu-1:5657; null: lost events stay lost."
            ),
        ]
        | None
    ) = None
    topic: Annotated[str, Meta(max_length=256, description="Prefix of the topics to receive; empty: all topics.")] = ""

    def check(self, ranks: int, path: str) -> None:
        """Check hosts, and the ports of all ranks; ConfigError."""
        for name in ("endpoint", "replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is None:
                continue
            check_base_url(f"http{endpoint.removeprefix('tcp')}", f"{path}.{name}")
            if int(endpoint.rpartition(":")[2]) + ranks - 1 > 65_535:
                raise ConfigError(f"{path}.{name}", f"the port of the last of {ranks} ranks is above 65535")


class ReplicaConfig(Frozen, frozen=True):
    """One vLLM engine behind a base URL. ``name`` is its identity on every hash ring; the URL may change."""

    name: Name
    url: Annotated[str, Meta(max_length=2048)]  # http(s)://host[:port][/base], no query
    state: ReplicaState = ReplicaState.ACTIVE
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # relative capacity of each data-parallel rank
    block_tokens: Annotated[int, Meta(ge=1)] | None = None  # tokens of a KV block; None until the engine reported it
    capacity_blocks: Annotated[int, Meta(ge=1)] | None = None  # KV blocks of each rank; None until reported
    api_key: Annotated[str, matching(r"[!-~]{1,1024}")] | None = None  # sent instead of the client's; a secret
    adapters: tuple[Model, ...] | None = None  # adapters that it has loaded; None: those that its /v1/models lists
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1  # ranks behind the URL, each with its own cache
    kv_events: KvEvents | None = None  # None: what it has cached is estimated
    role: Annotated[
        ReplicaRole,
        Meta(
            description="prefill: computes long prompts for the pool's other replicas, and gets no other requests. Any "
            "other role: serves requests, and fetches KV blocks from prefill replicas if the pool has some."
        ),
    ] = ReplicaRole.BOTH

    @property
    def can_decode(self) -> bool:
        """Whether it serves requests of clients."""
        return self.role is not ReplicaRole.PREFILL

    @property
    def capacity(self) -> float:
        """Relative capacity of all its ranks."""
        return self.weight * self.data_parallel_size


class PoolConfig(Frozen, frozen=True):
    """Replicas that serve the same models, and how requests are placed among them."""

    name: Name
    policy: PolicyConfig  # for requests of no task group, and of groups without a policy of their own
    models: tuple[Model, ...] = ()  # served names; (): any model
    aliases: tuple[Alias, ...] = ()
    adapters: tuple[Adapter, ...] = ()  # LoRA adapters that its replicas may have loaded
    adapter_replicas: (
        Annotated[
            int,
            number(
                "replicas",
                1,
                10_000,
                "How many of the replicas that have an adapter serve it; not set: all of them. With few, each loads "
                "fewer adapters and has more of their prefixes cached.",
            ),
        ]
        | None
    ) = None  # None: all
    replicas: tuple[ReplicaConfig, ...] = ()
    groups: tuple[TaskGroupConfig, ...] = ()
    health: HealthCheck = HealthCheck()
    breaker: BreakerConfig = BreakerConfig()
    caps: Caps = Caps()
    concurrency: ConcurrencyConfig | None = None  # for all of its requests; None: no limit
    tier1: Tier1 | None = None  # boundary of the tier-1 prefix; None: the policy's
    stream_usage: Annotated[
        StreamUsage,
        Meta(
            description="request: routers ask for the token usage of every stream and remove the extra chunk where the "
            "client did not ask; as_sent: streams whose clients do not ask are not accounted for."
        ),
    ] = StreamUsage.REQUEST
    on_stream_failure: Annotated[
        StreamFailure,
        Meta(
            description="What happens to a stream whose replica fails. continue: another replica generates the rest, "
            "where it can be the rest of the same text (vLLM and SGLang); end: the stream ends with an error event."
        ),
    ] = StreamFailure.CONTINUE
    keep_alive_s: (
        Annotated[
            float,
            number(
                "seconds",
                1,
                300,
                "After so long without a byte, a client that streams gets the head of the response and an SSE comment, "
                "again and again until the first token. Not set: none. Errors then come as events.",
            ),
        ]
        | None
    ) = None  # None: no comments
    warm_up: WarmUp | None = None  # of joining replicas; None: they take traffic with an empty cache
    session_keys: (
        Annotated[
            tuple[SessionKey, ...],
            Meta(
                description="Where requests name their session, in order: header:NAME, or a field such as body:user. "
                "The first that a request has is its session key; conversations with another key move once."
            ),
        ]
        | None
    ) = None  # None: DEFAULT_SESSION_KEYS; (): requests have no session
    paths: (
        Annotated[
            tuple[DataPath, ...],
            Meta(description="The paths that the pool serves. Requests for other paths get 404."),
        ]
        | None
    ) = None  # None: all
    disaggregation: Disaggregation | None = None  # None: its defaults; only used if a replica has a role
    allowed_origins: Annotated[
        tuple[Origin, ...],
        Meta(
            max_length=MAX_ORIGINS,
            description="Origins of the web pages whose scripts may use the pool (CORS), such as https://chat.example. "
            "*: all.",
        ),
    ] = ()

    @property
    def settings(self) -> Iterator[Settings]:
        """The settings of all its policies, canaries included."""
        for policy in (self.policy, *(group.policy for group in self.groups)):
            if policy is not None:
                yield policy.settings
                if policy.canary is not None:
                    yield policy.canary.settings

    @property
    def uses_residency(self) -> bool:
        """Whether any policy uses the estimated cached blocks; then the requests of all groups are recorded.

        A canary counts on every router, so that routers have the data when the canary is extended to them.
        """
        return any(settings.uses_residency for settings in self.settings)

    @property
    def names(self) -> ModelNames:
        """Every model, alias and adapter name that it serves."""
        return ModelNames(self.models, self.aliases, self.adapters)


class RouterConfig(Frozen, frozen=True):
    """Everything that a router needs to place requests."""

    hash_secret: Hex  # mixed into every prefix hash; the same on all routers of a fleet; never shown
    pools: tuple[PoolConfig, ...]
    limits: Limits = Limits()
    access: Access | None = None  # None: no API key is needed
    replica_networks: ReplicaNetworks | None = None  # None: replicas may have any address


def check_model_names(pools: Iterable[PoolConfig]) -> None:
    """Check that each name belongs to one pool, that at most one pool serves any model, and that references are known.

    Raises ConfigError.
    """
    owners: dict[str, str] = {}
    any_model: str | None = None
    for index, pool in enumerate(pools):
        path = f"$.pools[{index}]"
        for name, where in pool.names:
            if name in owners:
                raise ConfigError(f"{path}.{where}", f"model {name!r} is already served by pool {owners[name]!r}")
            owners[name] = pool.name
        adapters = {adapter.name for adapter in pool.adapters}
        references = [(f"adapters[{at}]", adapter.model) for at, adapter in enumerate(pool.adapters)]
        references += [
            (f"aliases[{at}]", alias.model) for at, alias in enumerate(pool.aliases) if alias.model not in adapters
        ]
        for where, model in references:
            if pool.models and model not in pool.models:
                raise ConfigError(f"{path}.{where}.model", f"the pool has no model {model!r}")
        if not pool.models:
            if any_model is not None:
                raise ConfigError(f"{path}.models", f"every model is already served by pool {any_model!r}")
            any_model = pool.name


def check_groups(pool: PoolConfig, keys: Collection[str], path: str) -> None:
    """Check references to replicas, models and API ``keys`` and unique claims; ConfigError."""
    replicas = {replica.name: replica for replica in pool.replicas}
    models = {name for name, _ in pool.names} if pool.models else None
    claims: dict[tuple[str, str], str] = {}
    for index, group in enumerate(pool.groups):
        where = f"{path}[{index}]"
        _check_replicas(group, replicas, pool.name, where)
        for field in group.match.__struct_fields__:
            for at, value in enumerate(getattr(group.match, field)):
                owner = claims.setdefault((field, value), group.name)
                if owner != group.name:
                    reason = f"{value!r} is claimed by task groups {owner!r} and {group.name!r}; only one may claim it"
                elif field == "models" and models is not None and value not in models:
                    reason = f"pool {pool.name!r} has no model {value!r}"
                elif field == "api_keys" and value not in keys:
                    reason = f"no API key is named {value!r}"
                else:
                    continue
                raise ConfigError(f"{where}.match.{field}[{at}]", reason)


def _check_replicas(group: TaskGroupConfig, replicas: Mapping[str, ReplicaConfig], pool: str, path: str) -> None:
    for position, name in enumerate(group.replicas or ()):
        if name not in replicas:
            raise ConfigError(f"{path}.replicas[{position}]", f"pool {pool!r} has no replica {name!r}")
    if group.replicas == ():
        raise ConfigError(f"{path}.replicas", "a group without replicas serves nothing; use null for all")
    if group.replicas is not None and not any(replicas[name].can_decode for name in group.replicas):
        reason = f"all replicas of task group {group.name!r} have the role prefill; add one that can decode"
        raise ConfigError(f"{path}.replicas", reason)


def check_config(config: RouterConfig) -> None:
    """Check the rules that types cannot express: unique names, known references, usable URLs; ConfigError."""
    _check_unique((pool.name for pool in config.pools), "$.pools", "pool")
    _check_unique(
        (replica.name for pool in config.pools for replica in pool.replicas), "$.pools[*].replicas", "replica"
    )
    check_model_names(config.pools)
    if config.replica_networks is not None:
        AddressRules(config.replica_networks)  # ConfigError for a text that is not a network
    keys = {key.name for key in config.access.keys} if config.access else set()
    for index, pool in enumerate(config.pools):
        path = f"$.pools[{index}]"
        _check_pool_replicas(pool, f"{path}.replicas")
        _check_unique((group.name for group in pool.groups), f"{path}.groups", "task group")
        check_groups(pool, keys, f"{path}.groups")
        if pool.session_keys is not None:
            check_session_keys(pool.session_keys, f"{path}.session_keys")
        if pool.paths is not None:
            check_paths(pool.paths, f"{path}.paths")
        check_origins(pool.allowed_origins, f"{path}.allowed_origins")
        check_canary(pool.policy, f"{path}.policy", {group.name for group in pool.groups if group.policy is None})
        for at, group in enumerate(pool.groups):
            if group.policy is not None:
                check_canary(group.policy, f"{path}.groups[{at}].policy", None)
            check_semantic_cache(group, config.pools, f"{path}.groups[{at}].semantic_cache")
    if config.access is not None:
        groups = {group.name for pool in config.pools for group in pool.groups}
        models = {name for pool in config.pools for name, _ in pool.names}
        check_access(config.access, groups, models if all(pool.models for pool in config.pools) else None)


def check_semantic_cache(group: TaskGroupConfig, pools: Iterable[PoolConfig], path: str) -> None:
    """Check that a group's semantic cache has an exact one to find responses in, and a pool for embeddings."""
    settings = group.semantic_cache
    if settings is None:
        return
    if group.response_cache is None:
        raise ConfigError(path, f"task group {group.name!r} has no response_cache, which holds the responses")
    pool = next((pool for pool in pools if pool.name == settings.embedding_pool), None)
    if pool is None:
        raise ConfigError(f"{path}.embedding_pool", f"no pool is named {settings.embedding_pool!r}")
    if pool.paths is not None and DataPath.EMBEDDINGS not in pool.paths:
        raise ConfigError(f"{path}.embedding_pool", f"pool {pool.name!r} does not serve {DataPath.EMBEDDINGS}")
    owner = next((pool for pool in pools if settings.embedding_model in {name for name, _ in pool.names}), None)
    if owner is not pool and (owner is not None or pool.models):
        reason = f"pool {pool.name!r} has no model {settings.embedding_model!r}"
        raise ConfigError(f"{path}.embedding_model", reason)


def _check_pool_replicas(pool: PoolConfig, path: str) -> None:
    adapters = {adapter.name for adapter in pool.adapters}
    for index, replica in enumerate(pool.replicas):
        check_base_url(replica.url, f"{path}[{index}].url")
        if replica.kv_events is not None:
            replica.kv_events.check(replica.data_parallel_size, f"{path}[{index}].kv_events")
        for position, name in enumerate(replica.adapters or ()):
            if name not in adapters:
                raise ConfigError(f"{path}[{index}].adapters[{position}]", f"the pool has no adapter {name!r}")
    if pool.replicas and not any(replica.can_decode for replica in pool.replicas):
        reason = f"all replicas of pool {pool.name!r} have the role prefill; give one the role decode or both"
        raise ConfigError(path, reason)
    ranks = sum(replica.data_parallel_size for replica in pool.replicas)
    if ranks > MAX_ON_RING:
        raise ConfigError(path, f"{ranks} replicas and ranks, where a pool has at most {MAX_ON_RING}")


def _check_unique(names: Iterable[str], path: str, kind: str) -> None:
    unique: set[str] = set()
    for name in names:
        if name in unique:
            raise ConfigError(path, f"two {kind}s are named {name!r}")
        unique.add(name)


KEY_HEX = r"[0-9a-f]{64}"  # a public key, 32 bytes

UnixSeconds = Annotated[int, Meta(ge=0, le=2**53)]


class Signature(Struct, frozen=True, kw_only=True):
    """The control plane's signature of a snapshot, and when it was made and expires."""

    key: Annotated[str, matching(r"[0-9a-f]{16}")]  # id of the public key that verifies it
    issued_at: UnixSeconds
    expires_at: UnixSeconds  # later the document is rejected; a router that runs it already keeps running it
    value: Annotated[str, matching(r"[0-9a-f]{128}")]


def key_id(public_key: str) -> str:
    """The id of a public key of 64 hex digits: the first 16 hex digits of its SHA-256."""
    return hashlib.sha256(bytes.fromhex(public_key)).hexdigest()[:16]


def signed_text(*, schema: int, revision: int, sha256: str, key: str, issued_at: int, expires_at: int) -> bytes:
    """The bytes that are signed: one field a line, none of which can contain a newline."""
    fields = (schema, revision, sha256, key, issued_at, expires_at)
    return "\n".join(("warmpath configuration 1", *map(str, fields))).encode()


SCHEMA_VERSION = 1
OLDEST_SCHEMA = 1


class Snapshot(Struct, frozen=True, kw_only=True):
    """The envelope of a numbered config. Of two snapshots the one with the higher ``revision`` wins."""

    schema: int = SCHEMA_VERSION
    revision: Annotated[int, Meta(ge=1)]
    sha256: str | UnsetType = UNSET  # of the bytes of ``config``; a hand-written file may leave it out
    signature: Signature | UnsetType = UNSET  # by the control plane; routers from before signatures ignore it
    config: msgspec.Raw


class LoadedSnapshot(Frozen, frozen=True):
    """A snapshot that passed every check. ``document`` is the envelope as received, for the last-known-good file."""

    revision: int
    sha256: str
    config: RouterConfig
    document: bytes
    schema: int = SCHEMA_VERSION
    signature: Signature | None = None  # not verified yet

    @property
    def signed_text(self) -> bytes:
        """The bytes that its signature covers; AssertionError if the snapshot has no signature."""
        if self.signature is None:
            raise AssertionError("the snapshot is not signed")
        return signed_text(
            schema=self.schema,
            revision=self.revision,
            sha256=self.sha256,
            key=self.signature.key,
            issued_at=self.signature.issued_at,
            expires_at=self.signature.expires_at,
        )


_DEFAULT_LIMITS = Limits()
_DEFAULT_AFFINITY = AffinitySettings()
_encoder = msgspec.json.Encoder(order="deterministic")
_envelopes = msgspec.json.Decoder(Snapshot)
_configs = msgspec.json.Decoder(RouterConfig)
_documents = msgspec.json.Decoder()


def dump_snapshot(config: RouterConfig, revision: int) -> LoadedSnapshot:
    """Number a config and add its digest; ConfigError if a router would reject it."""
    body = encode_config(config)
    envelope = Snapshot(revision=revision, sha256=hashlib.sha256(body).hexdigest(), config=msgspec.Raw(body))
    return load_snapshot(_encoder.encode(envelope))


def load_snapshot(document: bytes) -> LoadedSnapshot:
    """Read and check a whole snapshot; ConfigError names the first problem."""
    envelope = decode(_envelopes, document)
    if not OLDEST_SCHEMA <= envelope.schema <= SCHEMA_VERSION:
        supported = f"{OLDEST_SCHEMA} to {SCHEMA_VERSION}"
        raise ConfigError("$.schema", f"schema {envelope.schema} is not supported by this router ({supported})")
    body = bytes(envelope.config)
    actual = hashlib.sha256(body).hexdigest()
    if envelope.sha256 is not UNSET and envelope.sha256 != actual:
        reason = f"the config's digest is {actual}, not {envelope.sha256[:64]}: it was altered or truncated"
        raise ConfigError("$.sha256", reason)
    is_older = any(name.encode() in body for name in REMOVED_FIELDS)
    config = decode(_configs, msgspec.json.encode(without_removed(decode(_documents, body))) if is_older else body)
    check_config(config)
    return LoadedSnapshot(
        revision=envelope.revision,
        sha256=actual,
        config=config,
        document=document,
        schema=envelope.schema,
        signature=None if envelope.signature is UNSET else envelope.signature,
    )


def sign_document(
    document: bytes, *, key: str, issued_at: int, expires_at: int, sign: Callable[[bytes], bytes]
) -> bytes:
    """A snapshot's document with a signature by the key with this id; ``config`` keeps its bytes.

    Raises ConfigError if the document is not a snapshot. The config itself is not checked again.
    """
    envelope = decode(_envelopes, document)
    digest = hashlib.sha256(bytes(envelope.config)).hexdigest()
    text = signed_text(
        schema=envelope.schema,
        revision=envelope.revision,
        sha256=digest,
        key=key,
        issued_at=issued_at,
        expires_at=expires_at,
    )
    signature = Signature(key=key, issued_at=issued_at, expires_at=expires_at, value=sign(text).hex())
    return _encoder.encode(msgspec.structs.replace(envelope, sha256=digest, signature=signature))


def encode_config(config: RouterConfig) -> bytes:
    """The bytes whose digest identifies a config: equal configs give equal bytes within one release.

    Settings that older routers do not know are left out where they have their default.
    """
    tree = msgspec.to_builtins(config)
    _omit_default([tree], "replica_networks")
    _omit_default(tree["pools"], "warm_up")
    _omit_default(tree["pools"], "disaggregation")
    _omit_default(tree["pools"], "allowed_origins", ())
    policies = [row["policy"] for pool in tree["pools"] for row in (pool, *pool["groups"]) if row["policy"]]
    arms = [arm["settings"] for policy in policies for arm in (policy, policy.get("canary")) if arm]
    _omit_default(arms, "slack_s", _DEFAULT_AFFINITY.slack_s)
    replicas = [replica for pool in tree["pools"] for replica in pool["replicas"]]
    _omit_default(replicas, "kv_events")
    _omit_default(replicas, "role", ReplicaRole.BOTH.value)
    _omit_default([tree["limits"]], "response_timeout_s", _DEFAULT_LIMITS.response_timeout_s)
    _omit_default([tree["limits"]], "retry_on", _DEFAULT_LIMITS.retry_on)
    if tree["access"] is not None:
        _omit_default(tree["access"]["keys"], "expires_at")
    return msgspec.json.encode(tree)


def _omit_default(rows: Iterable[dict[str, object]], name: str, default: object = None) -> None:
    for row in rows:
        if row.get(name, ...) == default:
            del row[name]


def check_canary(policy: PolicyConfig, path: str, groups: Collection[str] | None) -> None:
    """Check that a canary has another revision, and routers and task groups to place for; ConfigError otherwise.

    ``groups`` are the task groups that a pool's policy places; None: the policy is a task group's own.
    """
    canary = policy.canary
    if canary is None:
        return
    if canary.revision == policy.revision:
        reason = f"revision {canary.revision} is active; a canary needs another revision"
        raise ConfigError(f"{path}.canary.revision", reason)
    if canary.routers == ():
        raise ConfigError(f"{path}.canary.routers", "a canary on no router places nothing; use null for all")
    if canary.groups is None:
        return
    if groups is None:
        reason = "only a pool's policy places several task groups; leave groups out of a task group's own"
        raise ConfigError(f"{path}.canary.groups", reason)
    if canary.groups == ():
        raise ConfigError(f"{path}.canary.groups", "a canary for no task group places nothing; use null for all")
    for at, name in enumerate(canary.groups):
        if name not in groups:
            reason = f"the pool's policy places no task group {name!r}: the pool has none, or it has its own policy"
            raise ConfigError(f"{path}.canary.groups[{at}]", reason)
