"""KV transfers between stand-in replicas, with the parameters of vLLM's NixlConnector (``kv_transfer_params``).

A request with ``do_remote_decode`` makes a replica keep the KV blocks of its prompt, and the response names them. A
request with ``do_remote_prefill`` fetches the named blocks from there, once: a second fetch fails, and so does one of
expired or unknown blocks. After a failed fetch the prompt is computed, or the request fails, as vLLM's
``kv_load_failure_policy`` says. Replicas without a role have no connector and ignore the parameters.

The real connector reads the memory of the other engine. Here the replica asks the other one over HTTP
(``POST /standin/kv_transfer``), and waits for as long as the copy would take. Kept blocks stay in the prefix cache of
the model like any others.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from enum import StrEnum
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from routing.standin.errors import ApiError

PATH = "/standin/kv_transfer"
KEPT_S = 480.0  # as VLLM_NIXL_ABORT_REQUEST_TIMEOUT
FETCH_TIMEOUT_S = 5.0


class Role(StrEnum):
    """The replica's part in disaggregated prefill."""

    PREFILL = "prefill"
    DECODE = "decode"


class LoadFailurePolicy(StrEnum):
    """What happens to a request whose blocks cannot be fetched."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class RemoteBlocks(Struct):
    """The members of ``kv_transfer_params`` that a fetch needs."""

    remote_request_id: str
    remote_engine_id: str
    remote_host: str
    remote_port: int


class Kept(Struct):
    """The number of tokens whose blocks are kept."""

    tokens: int


class Transfers:
    """The KV connector of one replica."""

    def __init__(self, tokens_per_s: float, policy: LoadFailurePolicy) -> None:
        self.engine_id = secrets.token_hex(16)
        self._tokens_per_s = tokens_per_s
        self._policy = policy
        self._kept: dict[str, tuple[int, float]] = {}  # (tokens, time of expiry), by request id
        self._next_block = 1

    def keep(self, tokens: int, block_tokens: int, address: tuple[str, int]) -> dict[str, Any]:
        """Keep the blocks of a prompt; returns the ``kv_transfer_params`` with which another replica can fetch them."""
        request_id = secrets.token_hex(8)
        self._kept[request_id] = (tokens, time.monotonic() + KEPT_S)
        blocks = -(-tokens // block_tokens)
        first, self._next_block = self._next_block, self._next_block + blocks
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(first, first + blocks)),
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": address[0],
            "remote_port": address[1],
            "tp_size": 1,
        }

    def release(self, blocks: RemoteBlocks) -> Kept:
        """Hand kept blocks over to another replica; returns the number of their tokens. ApiError if none are kept."""
        tokens, expires_at = self._kept.pop(blocks.remote_request_id, (0, 0.0))
        if blocks.remote_engine_id != self.engine_id or time.monotonic() > expires_at:
            raise ApiError(404, "NotFoundError", "These KV blocks are not kept, or were fetched before.")
        return Kept(tokens)

    async def fetch(self, params: dict[str, Any], prompt_tokens: int) -> int:
        """Fetch the blocks of a prompt; returns their tokens, 0 after a failure. ApiError if the policy is to fail."""
        if params.get("do_remote_prefill") is not True:
            return 0
        try:
            tokens = min(prompt_tokens, await _request_blocks(msgspec.convert(params, RemoteBlocks)))
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            if self._policy is LoadFailurePolicy.FAIL:
                raise ApiError(500, "InternalServerError", "Failed to load KV blocks.") from None
            return 0
        await asyncio.sleep(tokens / self._tokens_per_s)
        return tokens


async def _request_blocks(blocks: RemoteBlocks) -> int:
    url = f"http://{blocks.remote_host}:{blocks.remote_port}{PATH}"
    timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as http,
        http.post(url, data=msgspec.json.encode(blocks)) as response,
    ):
        return msgspec.json.decode(await response.read(), type=Kept).tokens
