"""Captured traffic as the input of a replay: prompts as chains of block ids, and engine parameters fitted to it.

Theory of operation, ids. A replay needs an id for each block of each prompt, and stored prompts have a sample of their
block hashes. Hashes are chained, so a sampled hash also identifies the blocks before it. A block between two sampled
ones gets an id from the sampled block before it for the first ``FILL / ratio`` blocks, and from the one after it
otherwise. So two prompts share ids up to a point near the one where they diverge, with about the standard error of
``chains.depth_error``. With a larger ``FILL`` the ends of short prompts look shared, which fills caches less; with a
smaller one long common parts look shorter. On seeded traffic a quarter of the hashes gives hit rates within 4 points of
all hashes, and a sixteenth within 7, whatever the size of caches. Blocks before the first sampled one take the tier-1
prefix in place of a sampled block. With all hashes stored, the ids are exact.

Theory of operation, tokens. Hashes are of blocks of bytes, engines count tokens. The ratio differs between code and
prose and between languages, so it is measured for each task group, and for a tier-1 prefix where that is of another
kind than its group. It is rounded to steps of 1 %. Ids contain the step, because the same blocks of bytes would be
different blocks of tokens.

Theory of operation, engines. An engine prefills prompts one after another, so TTFT is mostly waiting where it is busy.
From a request that finds it idle on, up to the last first token before it is idle again, an engine has computed all
uncached tokens of the requests that came meanwhile. So the seconds of these busy periods, over their uncached tokens,
give the prefill rate at any load and hit rate, as a line with a fixed part for each period and each request. The line
goes through a low quantile, because what delays an engine otherwise is not seen. Plain responses count with their
tokens, but do not end a period. The time between two tokens of one stream gives the duration of a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

import numpy as np
from numpy.typing import NDArray

from telemetry.lab.chains import Coded, Floats, Hashes, Integers, Requests

FILL = 1.0  # sampled blocks stand for this many times 1 / ratio blocks after them
RATIO_STEP = 1.01  # of tokens per byte block
OWN_RATIO = 1.1  # prompts with a tier-1 prefix whose tokens per block differ more from their group's use its own
MAX_IDS = 12_000_000  # of a replay: 100 MB
MIN_FIT = 30  # requests that a fit needs
MIN_SLOPE_S = 1e-7  # for each token: no engine prefills ten million tokens a second
CHUNK_TOKENS = 2048  # of a prompt in one step, as the modelled engines have it
FIT_ROUNDS = 30
IDLE_QUANTILE = 0.25  # of seconds: close to those of an engine that nothing else delays
DEFAULT_STEP_S = 0.010
DECODE_RATIO = 0.02  # additional duration of a step for each decoding sequence, as a share of the step
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CapturedTraffic:
    """Requests in order of time, with what only replays need. NaN and key 0: unknown or none."""

    requests: Requests
    ttft_s: Floats  # of streamed responses, by the routers' clock
    prefill_s: Floats  # of these, from sending the request to the replica; TTFT where it is not recorded
    latency_s: Floats  # until the last byte
    generated_tokens: Floats
    prefixes: Hashes  # recorded tier-1 keys
    sessions: Hashes
    routers: Coded
    revisions: Integers  # of the policy that placed the request

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class ReplayInput:
    """Columns of a replay: one item per request, and the ids of all prompts."""

    block_tokens: int
    byte_block_tokens: int  # of a block of bytes, the resolution of the ids
    prompt_tokens: Integers
    output_tokens: Integers
    starts: Integers  # one item more
    ids: Hashes


def replay_input(traffic: CapturedTraffic) -> ReplayInput:
    """Prompts as chains of ids; at most ``MAX_IDS`` ids, for which blocks are enlarged if necessary."""
    tokens, of_block = _prompt_tokens(traffic)
    usual = max(1, round(float(np.median(of_block)))) if len(traffic) else 1
    steps = np.round(np.log(np.maximum(of_block, 1.0) / usual) / log(RATIO_STEP)).astype(np.int64)
    block_tokens = max(usual, ceil(float(tokens.sum()) / MAX_IDS))
    counts = -(-tokens // block_tokens)
    output_tokens = _output_tokens(traffic)
    ids, known = _ids(traffic, counts, steps, block_tokens, usual)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    whole = (tokens + output_tokens) // block_tokens
    starts, ids = _with_output_ids(traffic, starts, ids, known=known, full=tokens // block_tokens, whole=whole)
    return ReplayInput(block_tokens, usual, tokens, output_tokens, starts, ids)


def _with_output_ids(
    traffic: CapturedTraffic, starts: Integers, ids: Hashes, *, known: Integers, full: Integers, whole: Integers
) -> tuple[Integers, Hashes]:
    """Append ids of generated tokens where a later prompt contains them, as the next turn of a conversation does.

    ``known``: blocks of each prompt with an id from a hash; ``full``: its whole blocks; ``whole``: of prompt and
    output. Engines cache generated tokens too. Where the end of a prompt has no hash of its own, because it ends within
    a block of bytes or is sampled, only a prompt of the same session continues it that is long enough for the output.
    """
    last = np.minimum(known, full)
    is_exact, sessions = (traffic.requests.sample_ratios >= 1) & (known >= full), traffic.sessions
    continued = np.flatnonzero((last > 0) & (whole > last))
    last_ids = ids[starts[continued] + last[continued] - 1]
    order = np.argsort(last_ids, kind="stable")
    found = np.searchsorted(last_ids[order], ids)
    is_last = np.append(last_ids[order], np.uint64(0))[np.minimum(found, len(order))] == ids
    is_last &= found < len(order)
    later: dict[int, tuple[int, int]] = {}  # request -> (start of the ids in a later prompt, their number)
    by_last_id = {int(last_ids[row]): int(continued[row]) for row in range(len(continued) - 1, -1, -1)}
    owners = np.repeat(np.arange(len(full)), np.diff(starts))
    for at in np.flatnonzero(is_last).tolist():
        request, owner = by_last_id[int(ids[at])], int(owners[at])
        needed, count = int(whole[request] - last[request]), int(starts[owner] + full[owner]) - at - 1
        is_session = bool(sessions[request]) and sessions[request] == sessions[owner]
        is_next = bool(is_exact[request]) or (is_session and count >= needed)
        count = min(count, needed)
        if owner > request and count > 0 and is_next and request not in later:
            later[request] = (at + 1, count)
    parts, lengths = [], np.diff(starts)
    for request in range(len(full)):
        begin, end = int(starts[request]), int(starts[request + 1])
        if request not in later:
            parts.append(ids[begin:end])
            continue
        (source, count), own_end = later[request], begin + int(last[request])
        parts.append(np.concatenate((ids[begin:own_end], ids[source : source + count], ids[own_end + count : end])))
        lengths[request] = len(parts[-1])
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64), np.concatenate(parts) if parts else ids


def _prompt_tokens(traffic: CapturedTraffic) -> tuple[Integers, Floats]:
    """(tokens of each prompt, at least 1; tokens of a block of bytes of its task group, or of its tier-1 prefix)."""
    requests = traffic.requests
    is_reported, byte_blocks = requests.prompt_tokens > 0, requests.byte_blocks
    weights = np.where(is_reported, byte_blocks, 0.0)
    counted = np.where(is_reported, requests.prompt_tokens, 0.0)
    overall = counted.sum() / weights.sum() if weights.any() else float(np.median(requests.hash_tokens))
    of_group = _ratios(counted, weights, requests.groups.codes, np.full(len(weights), overall))
    keys = _mixed(requests.groups.codes.astype(np.uint64)) ^ traffic.prefixes
    of_prefix = _ratios(counted, weights, np.unique(keys, return_inverse=True)[1], of_group)
    is_own = (traffic.prefixes != 0) & (np.abs(np.log(of_prefix / of_group)) > log(OWN_RATIO))
    ratio = np.where(is_own, of_prefix, of_group)
    tokens = np.where(is_reported, requests.prompt_tokens, byte_blocks * ratio)
    return np.maximum(1, np.round(tokens)).astype(np.int64), ratio


def _ratios(counted: Floats, weights: Floats, codes: Integers, otherwise: Floats) -> Floats:
    """Counted tokens / blocks of all requests with the same code as each request; ``otherwise`` without any."""
    totals = np.bincount(codes, weights)[codes] if len(codes) else weights
    sums = np.bincount(codes, counted)[codes] if len(codes) else counted
    return np.divide(sums, totals, out=otherwise.copy(), where=totals > 0)


def _output_tokens(traffic: CapturedTraffic) -> Integers:
    """Generated tokens, else the mean of those that are reported, else 1."""
    reported = traffic.generated_tokens[traffic.generated_tokens > 0]
    mean = float(reported.mean()) if len(reported) else 1.0
    return np.maximum(1, np.round(np.where(traffic.generated_tokens > 0, traffic.generated_tokens, mean))).astype(
        np.int64
    )


def _ids(
    traffic: CapturedTraffic, counts: Integers, steps: Integers, block_tokens: int, usual: int
) -> tuple[Hashes, Integers]:
    """(ids of all prompts, how many of each prompt are from a hash).

    A block of bytes has ``usual`` tokens, times ``RATIO_STEP`` for each step.
    """
    requests = traffic.requests
    rows = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the block in its prompt
    of_block = usual * RATIO_STEP ** steps.astype(np.float64)
    middles = (numbers + 0.5) * block_tokens / of_block[rows]  # in blocks of bytes: unbiased if their sizes differ
    at = np.minimum(middles, 2.0**20).astype(np.int64)
    sources = _sources(traffic, rows, at)
    is_known = (sources.hashes != 0) & (at < requests.block_counts[rows])
    salt = numbers * 4 + sources.kinds + (steps[rows] << 40)
    mixed = _mixed(sources.hashes ^ _mixed(salt.astype(np.uint64)))
    unique = _mixed(np.arange(1, len(rows) + 1, dtype=np.uint64) ^ np.uint64(0xA5A5A5A5A5A5A5A5))
    return np.where(is_known, mixed, unique), np.bincount(rows[is_known], minlength=len(counts))


@dataclass(frozen=True, slots=True)
class _Sources:
    """The sampled block that identifies each block; hash 0: none."""

    hashes: Hashes
    kinds: Integers  # 0: it is before the block, or the block itself; 1: after it; 2: the tier-1 prefix


def _sources(traffic: CapturedTraffic, rows: Integers, at: Integers) -> _Sources:
    requests = traffic.requests
    owners = np.repeat(np.arange(len(requests)), requests.lengths)
    sampled = owners << 21 | requests.positions
    before = np.searchsorted(sampled, rows << 21 | at, side="right") - 1
    blocks = np.append(requests.blocks, np.uint64(0))
    bounded_owners, bounded_positions = np.append(owners, -1), np.append(requests.positions, 0)
    has_before = (before >= 0) & (bounded_owners[before] == rows)
    after = before + 1
    has_after = bounded_owners[np.minimum(after, len(owners))] == rows
    reach = np.ceil(FILL / np.maximum(requests.sample_ratios, 2.0**-12))[rows]
    reach = np.where(requests.sample_ratios[rows] >= 1, 1, reach)
    distance = np.where(has_before, at - bounded_positions[before], at + 1)
    is_near = distance < reach
    use_before = has_before & is_near
    use_prefix = ~has_before & is_near & (traffic.prefixes[rows] != 0)
    use_after = ~use_before & ~use_prefix & has_after
    hashes = np.where(
        use_before,
        blocks[before],
        np.where(use_after, blocks[np.minimum(after, len(owners))], np.where(use_prefix, traffic.prefixes[rows], 0)),
    )
    return _Sources(hashes.astype(np.uint64), np.where(use_before, 0, np.where(use_after, 1, 2)))


def _mixed(values: Hashes) -> Hashes:
    """A bijection that spreads values over the 64-bit range (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Parameters of one engine; None: too few responses to fit them."""

    prefill_rate: float | None  # tokens/s
    rate_error: float  # relative standard error of the rate
    overhead_s: float  # of TTFT, whatever the prompt
    step_s: float
    decode_s: float
    requests: int  # number of requests in the fit


def fit_engine(traffic: CapturedTraffic, rows: Integers) -> EngineFit:
    """Fit the parameters of an engine, or of several alike ones, to the requests at these rows."""
    step_s = _step_s(traffic, rows)
    periods = _busy_periods(traffic, rows, step_s)
    line = _prefill_line(periods) if periods.requests.sum() >= MIN_FIT else None
    count = int(periods.requests.sum())
    if line is None or line.s_per_token <= max(MIN_SLOPE_S, 2 * line.error):
        return EngineFit(None, 0.0, 0.0, step_s, DECODE_RATIO * step_s, count)
    rate, overhead_s = 1 / line.s_per_token, max(0.0, line.fixed_s - step_s)
    return EngineFit(rate, rate * line.error, overhead_s, step_s, DECODE_RATIO * step_s, count)


def _step_s(traffic: CapturedTraffic, rows: Integers) -> float:
    """Duration of a decode step: a low quantile of the mean time between the tokens of a stream."""
    generated = traffic.generated_tokens[rows]
    decode_s = traffic.latency_s[rows] - traffic.ttft_s[rows]
    is_usable = (generated >= 8) & (decode_s > 0)
    if int(is_usable.sum()) < MIN_FIT:
        return DEFAULT_STEP_S
    return float(np.quantile(decode_s[is_usable] / (generated[is_usable] - 1), IDLE_QUANTILE))


@dataclass(frozen=True, slots=True)
class _BusyPeriods:
    """Times in which an engine always had prompts to prefill, up to the last first token that was seen."""

    seconds: Floats  # without the fixed part of steps beyond one for each request
    uncached: Floats  # tokens
    requests: Floats  # number of requests


def _busy_periods(traffic: CapturedTraffic, rows: Integers, step_s: float) -> _BusyPeriods:
    requests = traffic.requests
    parts = []
    for code in np.unique(requests.replicas.codes[rows]):
        of_engine = rows[requests.replicas.codes[rows] == code]
        at_s = requests.at_s[of_engine]
        uncached = requests.prompt_tokens[of_engine] - requests.cached_tokens[of_engine]  # NaN: not reported
        first_s = at_s + traffic.prefill_s[of_engine]
        is_seen = first_s > at_s
        decoded_s = step_s * np.maximum(0.0, np.nan_to_num(traffic.generated_tokens[of_engine]) - 1)
        guessed_s = np.maximum(0.0, np.nan_to_num(traffic.latency_s[of_engine]) - decoded_s)
        busy_until_s = np.maximum.accumulate(np.where(is_seen, first_s, at_s + guessed_s))
        begins = np.append(True, at_s[1:] >= busy_until_s[:-1])
        period = np.cumsum(begins) - 1
        last = np.full(period[-1] + 1, -1)
        np.maximum.at(last, period[is_seen], np.flatnonzero(is_seen))  # the last request whose first token was seen
        counted = np.arange(len(period)) <= last[period]
        size = len(last)
        tokens = np.bincount(period[counted], uncached[counted], size)
        is_known = (last >= 0) & (tokens > 0)
        further_steps = np.maximum(0, np.ceil(uncached[counted] / CHUNK_TOKENS) - 1)  # than one for each request
        # The decode steps of a saturated engine contain prefill, so they do not tell the fixed part of a step.
        steps_s = min(step_s, DEFAULT_STEP_S) * np.bincount(period[counted], further_steps, size)
        seconds = np.maximum(0.0, first_s[last] - at_s[begins] - steps_s)
        count = np.bincount(period[counted], minlength=size)
        parts.append(np.stack([seconds, tokens, count])[:, is_known])
    return _BusyPeriods(*np.concatenate(parts, axis=1)) if parts else _BusyPeriods(*np.empty((3, 0)))


@dataclass(frozen=True, slots=True)
class _PrefillLine:
    """Seconds of a busy period = fixed + so many for each request, and for each uncached token."""

    s_per_token: float
    error: float  # standard error of it
    fixed_s: float  # of a period with one request


def _prefill_line(periods: _BusyPeriods) -> _PrefillLine | None:
    """A line through a low quantile of the periods, by weighted least squares; None if the time does not grow."""
    seconds = periods.seconds
    columns = np.stack([periods.uncached, np.ones(len(seconds)), periods.requests])
    scale = 1 / (seconds + np.median(seconds))  # of relative residuals, because long periods vary more
    used = [0, 1, 2]
    while True:
        design, target = (columns[used] * scale).T, seconds * scale
        weights = np.ones(len(seconds))
        for _ in range(FIT_ROUNDS):
            root = np.sqrt(weights)
            found = np.linalg.lstsq(design * root[:, None], target * root, rcond=None)[0]
            residual = target - design @ found
            weights = np.where(residual > 0, IDLE_QUANTILE, 1 - IDLE_QUANTILE) / np.maximum(np.abs(residual), 1e-4)
        if found[0] <= 0:
            return None
        negative = [column for column, value in zip(used, found, strict=True) if value < 0]
        if not negative:
            break
        used.remove(negative[0])
    spread = 1.4826 * float(np.median(np.abs(residual)))
    error = spread * float(np.sqrt(np.linalg.pinv(design.T @ design)[0, 0]))
    return _PrefillLine(float(found[0]), error, float(found[1:].sum()))
