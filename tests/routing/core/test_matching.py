from __future__ import annotations

import pytest

from routing.core.matching import Matcher
from routing.core.types import UnknownModelError
from routing.schema import TaskGroupConfig
from tests.routing.building import config, pool, replicas

EMPTY = replicas(0)


def test_a_model_belongs_to_the_pool_that_serves_it() -> None:
    matcher = Matcher(config(pool(models=("llama", "lora-a")), pool(models=("mistral",), name="other", members=EMPTY)))

    assert matcher.pool("llama").name == matcher.pool("lora-a").name == "chat"
    assert matcher.pool("mistral").name == "other"


def test_an_unknown_model_is_refused_by_name() -> None:
    with pytest.raises(UnknownModelError, match="'gpt'") as refused:
        Matcher(config(pool(models=("llama",)))).pool("gpt")

    assert refused.value.model == "gpt"


def test_a_pool_of_any_model_takes_the_rest() -> None:
    matcher = Matcher(config(pool(models=("llama",)), pool(name="rest", members=EMPTY)))

    assert matcher.pool("llama").name == "chat"
    assert matcher.pool("gpt").name == matcher.pool(None).name == "rest"


def test_no_model_is_enough_where_there_is_one_pool() -> None:
    assert Matcher(config(pool(models=("llama",)))).pool(None).name == "chat"


def test_no_model_is_refused_where_it_could_be_any_of_several() -> None:
    matcher = Matcher(config(pool(models=("llama",)), pool(models=("mistral",), name="other", members=EMPTY)))

    with pytest.raises(UnknownModelError, match="no model was named"):
        matcher.pool(None)


def test_a_task_group_is_known_by_name_within_its_pool() -> None:
    support = TaskGroupConfig(name="support")
    one, other = pool(models=("llama",), groups=[support]), pool(models=("mistral",), name="other", members=EMPTY)
    matcher = Matcher(config(one, other))

    assert matcher.group(one, "support") is support
    assert matcher.group(other, "support") is None
    assert matcher.group(one, "SUPPORT") is None
    assert matcher.group(one, "") is matcher.group(one, None) is None
