"""Line charts of tables, as SVG files of a few kilobytes that follow the reader's light or dark colour scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 28, 20, 44
KEY_ROW = 20  # height of a line of the key, below the chart
# Distinguishable with colour blindness, contrast above 3:1 on white and on #0d1117; the dash tells lines apart too.
LINES = (("#c2410c", ""), ("#2f7fbf", "7 4"), ("#2e8b57", "2 4"), ("#9a6bd1", "10 4 2 4"), ("#a8741a", "1 3"))
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#241c17}.grid{stroke:#8f8378;stroke-opacity:.35}"
    "@media(prefers-color-scheme:dark){text{fill:#f3ece6}}"
)

Rows = dict[str, list[str]]  # cells of a table by the first cell of their row, header included


@dataclass(frozen=True)
class Chart:
    """Rows of a table over its header."""

    file: str
    table: str
    title: str
    x_label: str
    y_label: str
    rows: Sequence[str]
    log_x: bool = False
    log_y: bool = False

    def svg(self, rows: Rows) -> str:
        """The chart of a table's cells."""
        header, *_ = rows.values()
        xs = [_number(cell) for cell in header]
        lines = {row: [_number(cell) for cell in rows[row]] for row in self.rows}
        x_axis = _Axis(xs, LEFT, WIDTH - RIGHT, self.log_x)
        values = [value for line in lines.values() for value in line]
        y_axis = _Axis(values if self.log_y else [0.0, *values], HEIGHT - BOTTOM, TOP, self.log_y)
        height = HEIGHT + KEY_ROW * len(lines)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>",
        ]
        for value, text in zip(xs, header, strict=True):
            x = x_axis.at(value)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(text)}</text>')
        for value in y_axis.ticks():
            y = y_axis.at(value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>')
        parts.append(
            f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        parts.append(f'<text x="4" y="14">{escape(self.y_label)}</text>')
        for number, (name, line) in enumerate(lines.items()):
            colour, dash = LINES[number]
            stroke = f'fill="none" stroke="{colour}" stroke-width="2.5"' + (
                f' stroke-dasharray="{dash}"' if dash else ""
            )
            points = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in zip(xs, line, strict=True))
            y = HEIGHT + KEY_ROW * number + 6
            parts.append(f'<polyline {stroke} points="{points}"/><path {stroke} d="M{LEFT} {y}h36"/>')
            parts.append(f'<text x="{LEFT + 46}" y="{y + 4}">{escape(name.replace("`", ""))}</text>')
        return "\n".join([*parts, "</svg>\n"])


class _Axis:
    """Maps values to coordinates."""

    def __init__(self, values: Sequence[float], start: int, end: int, log: bool) -> None:
        self._log = log
        self._low, self._high = min(values), max(values)
        if log:
            self._low, self._high = math.log10(self._low), math.log10(self._high)
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """Coordinate of a value."""
        position = math.log10(value) if self._log else value
        return self._start + (self._end - self._start) * (position - self._low) / (self._high - self._low)

    def ticks(self) -> list[float]:
        """Values with a grid line: powers of ten, or four to eight round numbers."""
        if self._log:
            return [10.0**power for power in range(math.ceil(self._low), math.floor(self._high) + 1)]
        size = 10.0 ** math.floor(math.log10((self._high - self._low) / 4))
        step = next(size * factor for factor in (1, 2, 5, 10) if (self._high - self._low) / (size * factor) <= 8)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [step * number for number in range(first, last + 1)]


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


CHARTS = (
    Chart(
        "round-robin.svg",
        "round-robin",
        "Hit rate under round robin by number of replicas",
        "replicas",
        "hit rate, % of prompt tokens",
        (
            "literature, 1/N",
            "users grow with the fleet: 200 prompts per replica, caches hold 240",
            "short sessions: 2 turns",
            "long sessions: 20 turns",
            "one prompt has 80 % of the traffic",
        ),
        log_x=True,
    ),
    Chart(
        "turns.svg",
        "turns",
        "Mean TTFT by turn of a conversation, with and without affinity",
        "turn of the conversation",
        "TTFT mean, ms",
        (
            "TTFT mean, ms: `round_robin`",
            "TTFT mean, ms: `least_load`",
            "TTFT mean, ms: `prefix_hash`, up to the first message",
            "TTFT mean, ms: `lowest_cost`",
        ),
    ),
    Chart(
        "cache-on-off.svg",
        "cache-on-off",
        "TTFT by offered load, with and without prefix caches",
        "offered prompt tokens / what the replicas can prefill without caches",
        "TTFT, ms (logarithmic)",
        (
            "TTFT p50, ms: no cache",
            "TTFT p50, ms: cache",
            "TTFT p99, ms: no cache",
            "TTFT p99, ms: cache",
        ),
        log_x=True,
        log_y=True,
    ),
    Chart(
        "fetch-time.svg",
        "fetch-time",
        "Time to fetch or to compute a prefix",
        "tokens of the prefix",
        "ms (logarithmic)",
        ("prefill, 8,000 tokens/s", "fetch from cpu", "fetch from remote"),
        log_x=True,
        log_y=True,
    ),
)
