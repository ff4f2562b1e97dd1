"""Settings of a pool that routers do not need: the size of its model's KV cache, and prices. No queries.

Bytes of KV cache per token follow from the model's ``config.json``: each attention layer stores a key and a value
vector for each KV head, so a token takes ``layers x heads x head size x 2 x bytes of a number``. Models with multi-head
latent attention (DeepSeek) store one compressed vector and one positional key per layer instead. Tensor parallelism
splits this over GPUs and does not change the total, unless it is larger than the number of KV heads: then engines
store copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from controlplane.errors import InvalidError
from routing.schema import Frozen

MAX_BYTES_PER_TOKEN = 1 << 30
MAX_MONEY = 1_000_000


class CacheDtype(StrEnum):
    """The engine's ``--kv-cache-dtype``; AUTO is the model's own type."""

    AUTO = "auto"
    FP8 = "fp8"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class KvCache(Frozen, frozen=True):
    """How many bytes of KV cache a token takes: a number, or the model's configuration to compute it from."""

    bytes_per_token: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_BYTES_PER_TOKEN,
                description="Of all layers and GPUs together, instead of the model's configuration.",
                extra={"unit": "bytes"},
            ),
        ]
        | None
    ) = None
    dtype: Annotated[CacheDtype, Meta(description="The engines' --kv-cache-dtype; auto: the model's own type.")] = (
        CacheDtype.AUTO
    )
    model_config: (
        Annotated[dict[str, Any], Meta(description="The model's config.json. Only what the size follows from is kept.")]
        | None
    ) = None


class Costs(Frozen, frozen=True):
    """What a pool's replicas cost."""

    gpu_hour_price: Annotated[
        float, Meta(gt=0, le=MAX_MONEY, description="Price of one GPU for one hour.", extra={"unit": "per hour"})
    ]
    gpus_per_replica: Annotated[
        float,
        Meta(gt=0, le=1024, description="GPUs of one replica; below 1 for a part of one.", extra={"unit": "GPUs"}),
    ] = 1.0
    currency: Annotated[str, Meta(max_length=8, description="Shown beside amounts, such as USD; not converted.")] = ""


@dataclass(frozen=True, slots=True)
class KvBytes:
    """KV cache of one token over all layers and GPUs, and the limits of that figure."""

    bytes_per_token: int
    notes: tuple[str, ...] = ()


_SIZES = {"fp8": 1, "bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}  # bytes of a number
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYER_KINDS = ("layer_types", "layers_block_type")
_TYPES = ("dtype", "torch_dtype")
_SIZE_KEYS = frozenset(
    {
        *_LAYERS,
        *_HEADS,
        *_KV_HEADS,
        *_HIDDEN,
        *_LAYER_KINDS,
        *_TYPES,
        *("model_type", "head_dim", "multi_query", "kv_lora_rank", "qk_rope_head_dim", "sliding_window"),
        *("use_sliding_window", "full_attention_interval", "hybrid_override_pattern", "num_kv_shared_layers"),
        *("attn_layer_period", "attn_layer_offset"),
    }
)


def size_relevant_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a ``config.json`` that determine the size; those of ``text_config`` for a multimodal model."""
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    kept = {name: merged[name] for name in sorted(_SIZE_KEYS & merged.keys()) if merged[name] is not None}
    quantization = merged.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        kept["dtype"] = "fp8"
    return kept


def kv_bytes(settings: Mapping[str, Any] | None) -> KvBytes | None:
    """Bytes per token of a pool's ``kv_cache`` settings; None if it has none. InvalidError names the missing key."""
    if settings is None:
        return None
    if settings["bytes_per_token"] is not None:
        return KvBytes(settings["bytes_per_token"])
    if settings["model_config"] is None:
        raise InvalidError("$.kv_cache.bytes_per_token", "expected a number, or a model configuration instead")
    return kv_bytes_of_model(settings["model_config"], settings["dtype"])


def kv_bytes_of_model(config: Mapping[str, Any], cache_dtype: str = CacheDtype.AUTO) -> KvBytes:
    """Bytes per token from a model's ``config.json``; InvalidError names a key that is missing or not positive."""
    config = size_relevant_keys(config)
    size, notes = _number_bytes(config, cache_dtype)
    layers, layer_notes = _attention_layers(config)
    if "kv_lora_rank" in config:
        per_layer = _number(config, ("kv_lora_rank",)) + _number(config, ("qk_rope_head_dim",))
    else:
        per_layer = 2 * _kv_heads(config) * _head_size(config)
    return KvBytes(layers * per_layer * size, (*notes, *layer_notes))


def _number_bytes(config: Mapping[str, Any], cache_dtype: str) -> tuple[int, list[str]]:
    if cache_dtype != CacheDtype.AUTO:
        return _SIZES[cache_dtype], []
    name = next((str(config[key]) for key in _TYPES if key in config), "")
    if name.removeprefix("torch.") in {"float32", "float"}:
        return 2, ["Engines serve a float32 model in 16 bits, unless dtype says otherwise."]
    size = _SIZES.get(name.removeprefix("torch."))
    return (size, []) if size else (2, ["The model's number type is unknown: 16 bits are assumed."])


def _attention_layers(config: Mapping[str, Any]) -> tuple[int, list[str]]:
    """(layers that store keys and values for each token, notes)."""
    layers, notes = _number(config, _LAYERS), []
    kinds = next((config[key] for key in _LAYER_KINDS if isinstance(config.get(key), list)), None)
    attention = layers
    if kinds is not None:
        attention = sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
    elif "hybrid_override_pattern" in config:
        attention = str(config["hybrid_override_pattern"]).count("*")
    elif "full_attention_interval" in config:
        attention = layers // _number(config, ("full_attention_interval",))
    elif "attn_layer_period" in config:
        offset = config.get("attn_layer_offset") or 0
        period = _number(config, ("attn_layer_period",))
        attention = sum(layer % period == offset for layer in range(layers))
    if attention < layers:
        notes.append(
            f"{layers - attention} of {layers} layers have no attention: their state has a fixed size for each "
            "sequence and is not included."
        )
    shared = config.get("num_kv_shared_layers") or 0
    has_window = config.get("sliding_window") and config.get("use_sliding_window", True)
    if has_window or any(kind in str(kinds) for kind in ("sliding", "chunked")):
        notes.append("Layers with a sliding window keep fewer tokens, so this is an upper bound for long prompts.")
    if not isinstance(shared, int) or not 0 <= shared < attention:
        raise _missing("num_kv_shared_layers", "fewer than the attention layers")
    return attention - shared, notes


def _kv_heads(config: Mapping[str, Any]) -> int:
    if any(key in config for key in _KV_HEADS):
        return _number(config, _KV_HEADS)
    return 1 if config.get("multi_query") else _number(config, _HEADS)


def _head_size(config: Mapping[str, Any]) -> int:
    if "head_dim" in config:
        return _number(config, ("head_dim",))
    hidden, heads = _number(config, _HIDDEN), _number(config, _HEADS)
    if hidden % heads:
        raise _missing("head_dim", "a number, because hidden_size is no multiple of num_attention_heads")
    return hidden // heads


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The first of some synonymous keys."""
    value = next((config[key] for key in keys if key in config), None)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_BYTES_PER_TOKEN:
        raise _missing(keys[0], "a whole number of at least 1")
    return value


def _missing(key: str, expected: str) -> InvalidError:
    return InvalidError("$.kv_cache.model_config", f"{key}: expected {expected}")
