from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from routing.balancing.matching import MAX_UNKNOWN, Models, ServedModel
from routing.schema import Adapter, Alias, ConfigError, check_config
from routing.types import UnknownModelError
from tests.routing.building import config, pool, replicas

EMPTY = replicas(0)
LLAMA = replace(
    pool(models=("llama",)),
    aliases=(Alias("gpt-4o", "llama"), Alias("text-to-sql", "sql-v3")),
    adapters=(Adapter("sql-v3", "llama"),),
)
OTHER = pool(models=("mistral",), name="other", members=EMPTY)


def test_a_model_belongs_to_the_pool_that_serves_it() -> None:
    models = Models(config(pool(models=("llama", "lora-a")), OTHER))

    assert models.resolve("llama").pool.name == models.resolve("lora-a").pool.name == "chat"
    assert models.resolve("mistral").pool.name == "other"


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("llama", ("llama", "llama", "")),
        ("gpt-4o", ("llama", "llama", "")),
        ("sql-v3", ("sql-v3", "llama", "sql-v3")),
        ("text-to-sql", ("sql-v3", "llama", "sql-v3")),
        (None, ("llama", "llama", "")),
    ],
)
def test_a_name_stands_for_a_model_and_perhaps_an_adapter(name: str | None, served: tuple[str, str, str]) -> None:
    assert Models(config(LLAMA)).resolve(name) == ServedModel(LLAMA, *served)


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(UnknownModelError, match="`gpt`") as refused:
        Models(config(LLAMA)).resolve("gpt")

    assert refused.value.model == "gpt"


def test_a_pool_of_any_model_takes_the_rest() -> None:
    models = Models(config(pool(models=("llama",)), pool(name="rest", members=EMPTY)))

    assert models.resolve("llama").pool.name == "chat"
    assert models.resolve("gpt") == ServedModel(models.resolve(None).pool, "gpt", "gpt")
    assert models.resolve(None).pool.name == "rest"


def test_names_that_nobody_knows_are_remembered_up_to_a_number() -> None:
    models = Models(config(pool()))
    for number in range(3 * MAX_UNKNOWN):
        assert models.resolve(f"m{number}").model == models.resolve(f"m{number}").name == f"m{number}"
        assert len(models._unknown) <= MAX_UNKNOWN


def test_no_model_is_refused_where_it_could_be_any_of_several() -> None:
    with pytest.raises(UnknownModelError, match="No model was named"):
        Models(config(LLAMA, OTHER)).resolve(None)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"aliases": (Alias("llama", "llama"),)}, "$.pools[0].aliases[0].name"),
        ({"aliases": (Alias("mistral", "llama"),)}, "$.pools[1].models[0]"),
        ({"aliases": (Alias("a", "no-such"),)}, "$.pools[0].aliases[0].model"),
        ({"aliases": (Alias("a", "llama"), Alias("b", "a"))}, "$.pools[0].aliases[1].model"),
        ({"adapters": (Adapter("sql", "no-such"),)}, "$.pools[0].adapters[0].model"),
        ({"adapters": (Adapter("sql", "llama"), Adapter("sql", "llama"))}, "$.pools[0].adapters[1].name"),
        ({"replicas": replicas(2, adapters=("no-such",))}, "$.pools[0].replicas[0].adapters[0]"),
    ],
)
def test_names_that_contradict_one_another_are_refused_where_they_stand(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(config(replace(pool(models=("llama",)), **fields), OTHER))

    assert refused.value.path == path
