"""Bytes of KV cache per token, from configurations of published models."""

import pytest

from controlplane.errors import InvalidError
from controlplane.kv_cache import kv_bytes, kv_bytes_of_model, size_relevant_keys
from controlplane.services.fleet.pools import update_pool
from controlplane.web.tags import byte_size, of_tokens

LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B = {
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT = {
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (LLAMA_70B, "auto", 320 * 1024),
        (LLAMA_70B, "fp8", 160 * 1024),
        (LLAMA_70B, "float32", 640 * 1024),
        ({**LLAMA_70B, "torch_dtype": "float16"}, "auto", 320 * 1024),
        ({**LLAMA_70B, "torch_dtype": "float32"}, "auto", 320 * 1024),  # served in 16 bits
        ({"dtype": "torch.bfloat16", **LLAMA_70B}, "auto", 320 * 1024),
        ({**LLAMA_70B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "auto", 160 * 1024),
        ({**LLAMA_70B, "quantization_config": None}, "auto", 320 * 1024),
        ({**LLAMA_70B, "num_key_value_heads": None}, "auto", 80 * 64 * 128 * 2 * 2),  # no grouped queries
        ({"text_config": LLAMA_70B, "num_hidden_layers": 2, "vision_config": {}}, "auto", 320 * 1024),
        (DEEPSEEK_V3, "auto", 61 * (512 + 64) * 2),
        (DEEPSEEK_V3, "fp8", 61 * (512 + 64)),
        (GPT_OSS_20B, "auto", 24 * 8 * 64 * 2 * 2),
        (QWEN3_NEXT, "auto", 12 * 2 * 256 * 2 * 2),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, "float32", 12 * 768 * 2 * 4),
        ({"n_layer": 60, "n_head": 128, "hidden_size": 8192, "multi_query": True}, "float16", 60 * 64 * 2 * 2),
        (
            {**LLAMA_70B, "num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2},
            "auto",
            2 * 8 * 128 * 2 * 2,
        ),
        ({**LLAMA_70B, "num_hidden_layers": 4, "hybrid_override_pattern": "M*M-"}, "auto", 8 * 128 * 2 * 2),
        ({**LLAMA_70B, "num_kv_shared_layers": 20}, "auto", 60 * 8 * 128 * 2 * 2),
    ],
)
def test_bytes_per_token_follow_from_the_model(config, dtype, expected):
    assert kv_bytes_of_model(config, dtype).bytes_per_token == expected
    assert kv_bytes_of_model(size_relevant_keys(config), dtype).bytes_per_token == expected, "kept keys suffice"


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (GPT_OSS_20B, "upper bound"),
        (QWEN3_NEXT, "36 of 48 layers have no attention"),
        ({**LLAMA_70B, "torch_dtype": "float32"}, "16 bits"),
        ({**LLAMA_70B, "torch_dtype": "e8m0"}, "16 bits are assumed"),
        ({**LLAMA_70B, "sliding_window": 4096}, "upper bound"),
    ],
)
def test_a_figure_names_its_limits(config, note):
    assert note in " ".join(kv_bytes_of_model(config).notes)


def test_a_plain_model_and_an_unused_window_have_no_limits():
    assert kv_bytes_of_model(LLAMA_70B).notes == ()
    assert kv_bytes_of_model({**LLAMA_70B, "sliding_window": 4096, "use_sliding_window": False}).notes == ()


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "num_hidden_layers"),
        ({**LLAMA_70B, "num_hidden_layers": "80"}, "num_hidden_layers"),
        ({**LLAMA_70B, "num_hidden_layers": True}, "num_hidden_layers"),
        ({**LLAMA_70B, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 2, "hidden_size": 64}, "num_attention_heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 5, "hidden_size": 64}, "head_dim"),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({**LLAMA_70B, "num_kv_shared_layers": 80}, "num_kv_shared_layers"),
    ],
)
def test_a_configuration_without_a_size_names_the_key(config, key):
    with pytest.raises(InvalidError) as raised:
        kv_bytes_of_model(config)
    assert raised.value.faults[0].path == "$.kv_cache.model_config"
    assert key in raised.value.faults[0].reason


def test_a_number_wins_over_the_model_and_nothing_is_unknown():
    given = {"bytes_per_token": 7, "dtype": "auto", "model_config": LLAMA_70B}
    assert kv_bytes(given).bytes_per_token == 7
    assert kv_bytes(None) is None
    with pytest.raises(InvalidError, match="expected a number"):
        kv_bytes({"bytes_per_token": None, "dtype": "fp8", "model_config": None})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (320 * 1024, "320 KiB"),
        (of_tokens(320 * 1024, 2000), "625 MiB"),
        (40 * 1024**3, "40 GiB"),
        (1536 * 1024**4, "1,536 TiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_fitting_unit(value, text):
    assert byte_size(value) == text
    assert of_tokens(None, 5) is None
    assert of_tokens(5, None) is None


@pytest.mark.django_db
def test_a_replicas_cache_has_a_size_in_bytes_once_the_model_is_known(pool, replica):
    replica.block_tokens, replica.capacity_blocks = 16, 1000
    assert (replica.cache_tokens, replica.cache_bytes) == (16_000, None)
    update_pool(pool, kv_cache={"bytes_per_token": 1024})
    replica.pool.refresh_from_db()
    assert replica.cache_bytes == 16_000 * 1024
