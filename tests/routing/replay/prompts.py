"""Generated small traces with shared prefixes of all kinds, for property-based tests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from routing.traffic.columns import Columns

BLOCK = 4  # tokens


@dataclass(frozen=True)
class Row:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        return self.hash_ids[: self.prompt_tokens // BLOCK]


# (ticks since the previous request, a symbol for each block, tokens in the last block, output tokens)
Plan = tuple[int, tuple[int, ...], int, int]

plans = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 2, 7, 40]),
        st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=7).map(tuple),
        st.integers(1, BLOCK),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=25,
)


def rows_of(plans: list[Plan]) -> list[Row]:
    """Requests whose ids identify a block and all blocks before it. Times are multiples of 1/128 s."""
    ids: dict[tuple[object, ...], int] = {}
    rows, ticks = [], 0
    for gap, symbols, last, output in plans:
        ticks += gap
        tokens = (len(symbols) - 1) * BLOCK + last
        parts = [*symbols[:-1], symbols[-1] if last == BLOCK else (symbols[-1], last)]
        hash_ids = tuple(ids.setdefault(tuple(parts[: end + 1]), 1000 + len(ids)) for end in range(len(parts)))
        rows.append(Row(ticks / 128, tokens, output, hash_ids))
    return rows


def columns_of(rows: list[Row]) -> Columns:
    columns = Columns(BLOCK)
    for row in rows:
        columns.append(row.at_s, row.prompt_tokens, row.output_tokens, row.hash_ids)
    return columns
