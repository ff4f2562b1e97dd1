"""The size of a pool's KV cache and its prices: REST, the form, the bundle, and that routers do not get them."""

import json

import pytest

from controlplane.models import Event
from controlplane.services.fleet.pools import update_pool
from controlplane.services.snapshots import newest_snapshot
from tests.controlplane.test_kv_cache import LLAMA_70B
from tests.controlplane.web.test_router_settings import filled

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_pool")]
COSTS = {"gpu_hour_price": 2.5, "gpus_per_replica": 4.0, "currency": "USD"}


def test_only_the_needed_keys_of_a_configuration_are_kept(api, pool):
    before = newest_snapshot().sha256
    config = {**LLAMA_70B, "architectures": ["LlamaForCausalLM"], "vocab_size": 128256}
    response = api.patch("/api/v1/pools/default", {"kv_cache": {"model_config": config}}, format="json")
    assert response.status_code == 200, response.data
    assert response.data["kv_cache"] == {"bytes_per_token": None, "dtype": "auto", "model_config": LLAMA_70B}
    assert response.data["kv_bytes_per_token"] == 320 * 1024
    assert newest_snapshot().sha256 == before, "routers do not need it"
    assert Event.objects.filter(kind="pool_changed").exists()

    response = api.patch("/api/v1/pools/default", {"kv_cache": None}, format="json")
    assert (response.data["kv_cache"], response.data["kv_bytes_per_token"]) == (None, None)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"kv_cache": {}}, "#/kv_cache/bytes_per_token"),
        ({"kv_cache": {"bytes_per_token": 0}}, "#/kv_cache/bytes_per_token"),
        ({"kv_cache": {"bytes_per_token": 1, "dtype": "int3"}}, "#/kv_cache/dtype"),
        ({"kv_cache": {"model_config": {"num_hidden_layers": 2}}}, "#/kv_cache/model_config"),
        ({"kv_cache": {"model_config": []}}, "#/kv_cache/model_config"),
        ({"costs": {"currency": "USD"}}, "#/costs"),
        ({"costs": {"gpu_hour_price": 0}}, "#/costs/gpu_hour_price"),
        ({"costs": {"gpu_hour_price": 1, "gpus_per_replica": -1}}, "#/costs/gpus_per_replica"),
    ],
)
def test_an_invalid_setting_names_the_field_and_changes_nothing(api, pool, body, path):
    response = api.patch("/api/v1/pools/default", body, format="json")
    assert response.status_code == 422
    assert [error["pointer"] for error in response.data["errors"]] == [path]
    pool.refresh_from_db()
    assert (pool.kv_cache, pool.costs) == (None, None)


def test_prices_are_set_by_rest_and_exported(api, pool):
    assert api.patch("/api/v1/pools/default", {"costs": COSTS}, format="json").data["costs"] == COSTS
    (exported,) = api.get("/api/v1/config").data["pools"]
    assert (exported["costs"], exported["kv_cache"]) == (COSTS, None)


def test_the_pools_form_sets_keeps_and_removes_them(client, operator, pool):
    client.force_login(operator)
    url = f"/fleet/pools/{pool.pk}/"
    sent = filled(client.get(url).text) | {
        "kv_cache-model_config": json.dumps(LLAMA_70B | {"vocab_size": 5}),
        "kv_cache-dtype": "fp8",
        "costs-gpu_hour_price": "2.5",
        "costs-gpus_per_replica": "4",
        "costs-currency": "USD",
    }
    assert client.post(url, sent).status_code == 302
    pool.refresh_from_db()
    assert (pool.costs, pool.kv_bytes_per_token) == (COSTS, 160 * 1024)
    assert pool.kv_cache["model_config"] == LLAMA_70B

    again = filled(client.get(url).text)
    client.post(url, again)
    pool.refresh_from_db()
    assert pool.kv_cache["model_config"] == LLAMA_70B
    client.post(url, again | {"costs-unset": "on", "kv_cache-unset": "on"})
    pool.refresh_from_db()
    assert (pool.costs, pool.kv_cache) == (None, None)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"kv_cache-model_config": "{"}, "kv_cache-model_config", "Expected a JSON object"),
        ({"kv_cache-model_config": "[1]"}, "kv_cache-model_config", "Expected a JSON object"),
        ({"kv_cache-model_config": "{}"}, "kv_cache-model_config", "num_hidden_layers"),
        ({"kv_cache-dtype": "fp8"}, "kv_cache-bytes_per_token", "expected a number"),
        ({"costs-currency": "USD"}, "costs-gpu_hour_price", "Required together"),
    ],
)
def test_an_invalid_form_shows_the_error_at_its_field(client, operator, pool, change, field, text):
    client.force_login(operator)
    url = f"/fleet/pools/{pool.pk}/"
    answer = client.post(url, filled(client.get(url).text) | change)
    assert answer.status_code == 422
    assert f'id="id_{field}_error"' in answer.text
    assert text in answer.text


def test_a_replicas_cache_has_a_size_in_bytes_once_the_model_is_known(pool, replica):
    replica.block_tokens, replica.capacity_blocks = 16, 1000
    assert (replica.cache_tokens, replica.cache_bytes) == (16_000, None)
    update_pool(pool, kv_cache={"bytes_per_token": 1024})
    replica.pool.refresh_from_db()
    assert replica.cache_bytes == 16_000 * 1024
