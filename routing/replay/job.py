"""A what-if job: captured requests in columns, and the scenarios to replay them under. Read from and written to files.

The control plane writes a job and runs ``python -m routing what-if JOB RESULT`` in a process of its own. Columns are
arrays in native byte order: both run on one machine.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Annotated, Any

import msgspec

from routing.replay.captured import CapturedColumns
from routing.replay.fast_engine import FastEngineConfig
from routing.schema import PoolConfig
from routing.traffic.columns import Columns

Count = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(gt=0)]


class EngineModel(msgspec.Struct, frozen=True):
    """Parameters of one engine, a replica or one of its ranks, as in ``FastEngineConfig``."""

    target: str
    blocks: Count  # of the job's ``block_tokens``
    prefill_rate: Rate  # tokens/s
    step_s: Rate
    decode_s: Annotated[float, msgspec.Meta(ge=0)]
    chunk_tokens: Count = 2048
    max_running: Count = 256


class Scenario(msgspec.Struct, frozen=True):
    """One way to place the requests: by a pool's configuration."""

    name: str
    engines: list[EngineModel]
    pool: PoolConfig
    routers: Count = 1  # with separate load tracking and residency; request ``i`` belongs to ``router[i] % routers``


class Job(msgspec.Struct, frozen=True):
    """Captured requests in order of arrival, and scenarios. Each bytes field is an array with one item per request."""

    block_tokens: Count
    groups: list[str]  # names that ``group`` refers to
    at_s: bytes  # float64
    prompt_tokens: bytes  # int64
    output_tokens: bytes  # int64
    starts: bytes  # int64, one item more: where the ids of each request begin
    ids: bytes  # uint64, of all requests: one per block of the prompt, which may be partial, and of known output
    tier1: bytes  # uint64; 0: no tier-1 prefix
    session: bytes  # uint64; 0: no session
    group: bytes  # int64
    router: bytes  # int64
    scenarios: list[Scenario]


class ScenarioResult(msgspec.Struct, frozen=True):
    """Results by request, or the reason why the scenario cannot be replayed."""

    name: str
    reason: str = ""
    ttft_s: bytes = b""  # float64
    cached_tokens: bytes = b""  # int64
    engine: bytes = b""  # int64: index into the scenario's engines
    reasons: dict[str, int] = {}  # decisions by reason
    evicted_blocks: int = 0
    overloaded: list[int] = []  # engines whose queue grows until the end, in ``engine``'s numbers


def read_job(path: Path) -> Job:
    """A job file; OSError, or msgspec.MsgspecError for anything else than a job."""
    job: Job = msgspec.msgpack.decode(path.read_bytes(), type=Job)
    return job


def encode(document: Any) -> bytes:
    """A job or a list of results as bytes."""
    return msgspec.msgpack.encode(document)


def captured_columns(job: Job) -> CapturedColumns:
    """The requests of a job."""
    columns = Columns(job.block_tokens)
    columns.at_s = array("d", job.at_s)
    columns.prompt_tokens = array("q", job.prompt_tokens)
    columns.output_tokens = array("q", job.output_tokens)
    columns.starts = array("q", job.starts)
    columns.ids = array("Q", job.ids)
    return CapturedColumns(
        columns,
        job.groups,
        array("Q", job.tier1),
        array("Q", job.session),
        array("q", job.group),
        array("q", job.router),
    )


def engine_config(model: EngineModel, block_tokens: int) -> FastEngineConfig:
    """The configuration of a modelled engine."""
    options = msgspec.structs.asdict(model)
    del options["target"]
    return FastEngineConfig(block_tokens=block_tokens, **options)
