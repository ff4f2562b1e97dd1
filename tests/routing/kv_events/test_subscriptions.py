"""KV events over loopback ZeroMQ: what a router knows of its replicas in each situation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest
import zmq

from routing.balancing.residency import Residency
from routing.kv_events.subscriptions import KvEventSubscriptions
from routing.kv_events.zmtp import greeting_and_ready, message
from routing.schema import (
    KvEvents,
    LeastLoadSettings,
    LowestCostSettings,
    PolicySettings,
    ReplicaConfig,
    ReplicaNetworks,
    ReplicaState,
    RouterConfig,
)
from routing.types import TargetId
from tests.fakes.kv_publisher import KvPublisher, payload_of, removed, stored
from tests.routing.building import DEADLINE_S, pool, until
from tests.routing.building import config as config_of
from tests.side_by_side import alone

TARGET = TargetId("a")


def config(publisher: KvPublisher, settings: PolicySettings | None = None, **fields: Any) -> RouterConfig:
    events = KvEvents(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint, topic="kv@")
    replica = ReplicaConfig(name="a", url="http://127.0.0.1:1", kv_events=events, **fields)
    return config_of(pool(settings or LowestCostSettings(), members=(replica,)))


class Router:
    """The subscriptions of a router, and its residency index, in which replica a has some prompt."""

    def __init__(self) -> None:
        self.residency = Residency()
        self.residency.add_replica(TARGET)
        self.subscriptions = KvEventSubscriptions(self.residency, asyncio.get_running_loop().time)

    def row(self, configuration: RouterConfig) -> dict[str, Any]:
        rows = self.subscriptions.rows(configuration.pools[0].replicas[0])
        assert rows is not None
        return rows[0]

    def believe(self) -> None:
        """Record a prompt of three blocks that the router has sent."""
        self.residency.insert(TARGET, [1, 2, 3], asyncio.get_running_loop().time())

    @property
    def believed(self) -> int:
        entry = self.residency.replica(TARGET)
        return entry.tokens // self.residency.block_tokens if entry is not None else 0


@contextmanager
def opened(*, replays: bool = True) -> Iterator[tuple[Router, KvPublisher]]:
    """A router without subscriptions, and a publisher."""
    publisher, router = KvPublisher(replays=replays), Router()
    try:
        yield router, publisher
    finally:
        router.subscriptions.close()
        publisher.close()


@asynccontextmanager
async def following(
    *, replays: bool = True, settings: PolicySettings | None = None
) -> AsyncIterator[tuple[Router, KvPublisher, Callable[[], dict[str, Any]]]]:
    """A router whose subscription has reached a publisher, and a function for its row in /admin/replicas."""
    with opened(replays=replays) as (router, publisher):
        configuration = config(publisher, settings)
        router.subscriptions.configure(configuration)
        await until(publisher.has_subscriber, "the subscription")
        if replays:
            await until(lambda: router.row(configuration)["state"] == "following", "the replay")
        yield router, publisher, lambda: router.row(configuration)


async def test_stored_and_removed_blocks_are_counted():
    async with following() as (_, publisher, row):
        publisher.publish(stored([1, 2, 3], list(range(12))))
        await until(lambda: row()["blocks"] == 3, "three blocks")
        publisher.publish(removed(3), removed(2))
        await until(lambda: row()["blocks"] == 1, "one block")

        assert row()["state"] == "following"
        assert (row()["messages"], row()["events"], row()["gaps"], row()["capacity_tokens"]) == (2, 3, 0, 12)
        assert 0 <= row()["lag_s"] < DEADLINE_S


async def test_offloaded_blocks_are_part_of_the_capacity():
    async with following() as (router, publisher, row):
        replica = router.residency.replica(TARGET)
        assert replica is not None
        offloaded = {"block_size": 0, "token_ids": [], "extra_keys": None, "medium": "CPU"}
        publisher.publish(stored([1, 2, 3], list(range(12))), stored([1, 2], [], **offloaded), removed(3, 2, 1))
        await until(lambda: row()["offloaded"] == 2, "the offloaded blocks")

        assert (row()["state"], row()["malformed"], row()["blocks"]) == ("following", 0, 0)
        await until(lambda: replica.capacity_ratio == pytest.approx(5 / 3), "the capacity")
        assert any(line.endswith("} 2") for line in router.subscriptions.lines() if "_offloaded_blocks{" in line)


async def test_a_gap_is_replayed():
    async with following() as (_, publisher, row):
        publisher.publish(stored([1], [1] * 4))
        await until(lambda: row()["blocks"] == 1, "the block")
        publisher.publish(stored([2], [2] * 4), is_lost=True)
        publisher.publish(stored([3], [3] * 4))
        await until(lambda: row()["blocks"] == 3, "all blocks")

        assert (row()["state"], row()["gaps"], row()["lost"]) == ("following", 1, 0)


@alone
async def test_a_replay_endpoint_that_does_not_respond_is_given_up_within_a_second():
    async with following() as (_, publisher, row):
        publisher.answers_replays = False
        publisher.publish(stored([1], [1] * 4), is_lost=True)
        publisher.publish(stored([2], [2] * 4))
        await until(lambda: row()["state"] == "replaying", "the gap")
        since = asyncio.get_running_loop().time()
        await until(lambda: row()["state"] == "partial", "the end of the replay")

        assert asyncio.get_running_loop().time() - since < 1.5  # 0.75 s, on a busy machine
        assert (row()["blocks"], row()["lost"]) == (1, 1)


async def test_a_publisher_that_dies_leaves_the_estimate_and_its_successor_an_empty_cache():
    async with following() as (router, publisher, row):
        publisher.publish(stored([1, 2], [1] * 8))
        await until(lambda: row()["blocks"] == 2, "the blocks")
        router.believe()
        publisher.stop()
        await until(lambda: row()["state"] == "estimated", "the lost connection")
        assert (row()["is_followed"], row()["blocks"], router.believed) == (False, None, 3)
        entry = router.residency.replica(TARGET)
        assert entry is not None
        assert entry.on_response is None

        publisher.start()
        await until(lambda: row()["state"] == "following", "the successor")
        assert (row()["blocks"], row()["restarts"], router.believed) == (0, 1, 0)
        publisher.publish(stored([7], [7] * 4))
        await until(lambda: row()["blocks"] == 1, "its first block")


@pytest.mark.parametrize(
    "frames",
    [
        [b"kv@x"],
        [b"kv@x", b"short", b""],
        [b"kv@x", b"\0" * 8, b"garbage"],
        [b"kv@x", b"\xff" * 8, b""],
        [b"kv@x", b"\0" * 8, b"", b"more"],
        [b"kv@x", b"\0" * 8, payload_of([{"type": "BlockStored", "block_hashes": ["x"]}])],
    ],
)
async def test_garbage_is_survived_and_makes_no_defect(frames, caplog):
    async with following(replays=False) as (_, publisher, row):
        publisher.pub.send_multipart(frames)
        publisher.publish(stored([1], [1] * 4), is_lost=True)
        publisher.publish(stored([2], [2] * 4), is_lost=True)
        publisher.publish(stored([3], [3] * 4))
        publisher.publish(stored([4], [4] * 4))
        await until(lambda: row()["blocks"] in {1, 2}, "the blocks after the garbage")
    assert "defect" not in caplog.text


async def test_messages_of_other_topics_are_not_received():
    async with following() as (_, publisher, row):
        publisher.pub.send_multipart([b"other", b"\0" * 8, payload_of([stored([9], [1] * 4)])])
        publisher.publish(stored([1], [1] * 4))
        await until(lambda: row()["blocks"] == 1, "the block")
        assert row()["messages"] == 1


async def test_an_unchanged_source_is_followed_on_and_a_removed_one_is_closed():
    async with following() as (router, publisher, row):
        publisher.publish(stored([1], [1] * 4))
        await until(lambda: row()["blocks"] == 1, "the block")
        router.subscriptions.configure(config(publisher, weight=2.0, state=ReplicaState.DRAINING))
        assert row()["blocks"] == 1
        assert publisher.replays == 1

        router.subscriptions.configure(config(publisher, state=ReplicaState.DISABLED))
        assert row() == {"state": "unused"}
        entry = router.residency.replica(TARGET)
        assert entry is not None
        assert (entry.on_response, entry.expires) == (None, True)


async def test_pools_that_do_not_compare_cached_prefixes_follow_nothing():
    with opened() as (router, publisher):
        configuration = config(publisher, LeastLoadSettings())
        router.subscriptions.configure(configuration)
        assert router.row(configuration) == {"state": "unused"}
        assert '{pool="chat",replica="a",rank="0",state="unused"} 1' in "\n".join(router.subscriptions.lines())


async def test_each_rank_has_the_next_port_and_its_own_blocks():
    router = Router()
    publishers = adjacent_publishers()
    events = KvEvents(endpoint=publishers[0].endpoint)
    replica = ReplicaConfig(name="a", url="http://127.0.0.1:1", kv_events=events, data_parallel_size=2)
    try:
        router.subscriptions.configure(config_of(pool(LowestCostSettings(), members=(replica,))))
        for rank, publisher in enumerate(publishers):
            await until(publisher.has_subscriber, "the subscription")
            blocks = list(range(rank + 1))
            publisher.publish(payload=payload_of([stored(blocks, [1] * 4 * len(blocks))], rank=rank))
        rows = router.subscriptions.rows
        await until(lambda: [row["blocks"] for row in rows(replica) or ()] == [1, 2], "the blocks of both ranks")
        assert [row["rank"] for row in rows(replica) or ()] == [0, 1]
    finally:
        router.subscriptions.close()
        for publisher in publishers:
            publisher.close()


def adjacent_publishers() -> list[KvPublisher]:
    """Two publishers whose ports follow each other."""
    for _ in range(50):
        first, second = KvPublisher(replays=False), KvPublisher(replays=False)
        second.stop()
        second.endpoint = f"tcp://127.0.0.1:{int(first.endpoint.rpartition(':')[2]) + 1}"
        try:
            second.start()
        except zmq.ZMQError:  # another process has the port
            first.close()
            second.close()
        else:
            return [first, second]
    raise AssertionError("no two adjacent ports are free")


async def test_messages_that_a_slow_router_loses_are_replayed():
    """The router takes nothing while its loop is busy, and the queues between are shorter than the burst."""
    async with following() as (_, publisher, row):
        for number in range(4000):
            publisher.publish(stored([number], [number] * 4, padding="x" * 10_000))
        await until(lambda: row()["messages"] > 500 and row()["state"] == "following", "the burst")
        publisher.publish(stored([4000], [1] * 4))
        await until(lambda: row()["blocks"] == 4001, "all blocks")
        assert row()["gaps"] >= 1
        assert row()["lost"] == 0
        assert row()["messages"] < 4001


async def test_forbidden_addresses_are_not_connected_to(caplog):
    with opened() as (router, publisher):
        configuration = config(publisher)
        networks = ReplicaNetworks(forbidden=("127.0.0.0/8",))
        forbidden = RouterConfig(
            hash_secret=configuration.hash_secret, pools=configuration.pools, replica_networks=networks
        )
        router.subscriptions.configure(forbidden)
        await until(lambda: "kv_events_not_opened" in caplog.text, "the rejection")
        assert not publisher.has_subscriber()
        assert router.row(configuration)["state"] == "estimated"


@pytest.mark.plain_python(reason="replaces a method of a native object")
async def test_a_defect_in_one_stream_does_not_end_the_others(monkeypatch, caplog):
    one, other, router = KvPublisher(), KvPublisher(), Router()
    replicas = tuple(
        ReplicaConfig(
            name=name,
            url="http://127.0.0.1:1",
            kv_events=KvEvents(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint),
        )
        for name, publisher in (("a", one), ("b", other))
    )
    configuration = config_of(pool(LowestCostSettings(), members=replicas))

    def state(replica: ReplicaConfig) -> str:
        return router.subscriptions.rows(replica)[0]["state"]  # type: ignore[index,no-any-return]

    try:
        router.subscriptions.configure(configuration)
        await until(lambda: all(state(replica) == "following" for replica in replicas), "both")
        with monkeypatch.context() as broken:
            engines = [f.engine for f in router.subscriptions._followers.values()]
            broken.setattr(engines[0].blocks, "store", lambda *_: 1 / 0)
            one.publish(stored([1], [1] * 4))
            await until(lambda: "defect" in caplog.text, "the defect")
            assert state(replicas[0]) == "estimated"
        other.publish(stored([1], [1] * 4))
        await until(lambda: router.subscriptions.rows(replicas[1])[0]["blocks"] == 1, "the other")  # type: ignore[index]
        await until(lambda: state(replicas[0]) in {"following", "partial"}, "the stream to be opened again")
    finally:
        router.subscriptions.close()
        one.close()
        other.close()


async def test_metrics_show_every_stream():
    async with following() as (router, publisher, row):
        publisher.publish(stored([1], [1] * 4))
        await until(lambda: row()["blocks"] == 1, "the block")
        text, since_s = "\n".join(router.subscriptions.lines()), row()["since_s"]

    labels = '{pool="chat",replica="a",rank="0"}'
    assert '_state{pool="chat",replica="a",rank="0",state="following"} 1' in text
    assert f"warmpath_router_kv_events_state_timestamp_seconds{labels} {since_s:.10g}" in text
    assert f"warmpath_router_kv_events_followed{labels} 1" in text
    assert f"warmpath_router_kv_events_received_total{labels} 1" in text
    assert f"warmpath_router_kv_events_blocks{labels} 1" in text
    assert f"warmpath_router_kv_events_gaps_total{labels} 0" in text
    assert json.dumps(row())


async def test_a_length_of_one_wrong_bit_ends_the_stream_and_the_estimate_takes_over():
    """The stream was "following" and "complete" for ever, while everything later was thrown away."""
    connected = asyncio.Event()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting_and_ready(b"PUB"))
        payload = payload_of([stored([1], [1] * 4)])
        writer.write(message([b"kv@x", bytes(8), payload]))
        await connected.wait()
        writer.write(b"\x02" + (1 << 62).to_bytes(8, "big"))
        with suppress(ConnectionError):
            while await reader.read(1000):
                writer.write(b"x" * 100)
        writer.close()

    async with await asyncio.start_server(engine, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        events = KvEvents(endpoint=f"tcp://127.0.0.1:{port}", topic="kv@")
        replica = ReplicaConfig(name="a", url="http://127.0.0.1:1", kv_events=events)
        configuration, router = config_of(pool(LowestCostSettings(), members=(replica,))), Router()
        router.subscriptions.configure(configuration)
        try:
            await until(lambda: router.row(configuration)["blocks"] == 1, "the first block")
            connected.set()
            await until(lambda: router.row(configuration)["state"] == "estimated", "the end of the stream")
            await until(lambda: router.row(configuration)["reason"] is not None, "the reason")
            assert "a frame of 4,611,686,018,427,387,904 bytes" in router.row(configuration)["reason"]
        finally:
            router.subscriptions.close()
