import math
from datetime import UTC, datetime, timedelta

import pytest

from telemetry.metrics.windows import PointState, Series, Window
from telemetry.web import figures
from telemetry.web.charts import HIT_RATE, TTFT
from telemetry.web.figures import build_figure

START = datetime(2031, 3, 4, 12, tzinfo=UTC)
WINDOW = Window(START, START + timedelta(seconds=20), 5)


def line(label, values, band=()):
    points = [(at, value) for at, value in zip(WINDOW.starts(), values, strict=True)]
    return Series(label, points, [PointState.OK] * len(points), list(band))


def drawn(lines, view=HIT_RATE.views[0]):
    return build_figure(view, lines, [], WINDOW)["data"]


def test_of_many_lines_the_highest_and_lowest_are_drawn_and_the_rest_is_a_band():
    traces = drawn([line(f"r{n}", [n / 40] * 4) for n in range(40)])

    assert [trace["name"] for trace in traces[1:]] == [f"r{n}" for n in (*range(6), *range(34, 40))]
    band = traces[0]
    assert (band["meta"], band["name"]) == ("band", "28 others, minimum to maximum")
    assert (min(band["y"]), max(band["y"])) == (6 / 40, 33 / 40)


def test_a_line_keeps_its_colour_whichever_others_are_drawn():
    many = {trace["name"]: trace["line"] for trace in drawn([line(f"r{n}", [n / 40] * 4) for n in range(40)])}
    few = {trace["name"]: trace["line"] for trace in drawn([line(f"r{n}", [n / 40] * 4) for n in range(4)])}

    assert many["r3"]["color"] == few["r3"]["color"]
    assert many["r3"]["dash"] == few["r3"]["dash"]


def test_a_band_has_a_gap_where_values_are_unknown():
    edges = [(0.1, 0.2), None, (0.3, 0.4), (0.3, math.inf)]
    band = drawn([line("p50", [0.15, None, 0.35, 0.36], edges)], TTFT.views[0])[0]

    assert band["y"] == [0.2, 0.1, None, 0.4, 0.3]
    assert band["meta"] == "edge"


def test_a_value_between_gaps_is_marked_because_no_line_would_show_it():
    assert drawn([line("r1", [None, 0.5, None, None])])[0]["mode"] == "lines+markers"
    assert drawn([line("r1", [0.5, 0.5, None, None])])[0]["mode"] == "lines"


def test_mark_up_in_a_name_is_escaped():
    assert "&lt;b&gt;" in drawn([line("<b>", [1, 1, 1, 1])])[0]["hovertemplate"]


def luminance(colour):
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("surface", figures.SURFACES)
@pytest.mark.parametrize("colour", figures.COLOURS)
def test_every_line_stands_out_on_both_themes(colour, surface):
    low, high = sorted((luminance(colour), luminance(surface)))

    assert (high + 0.05) / (low + 0.05) >= 3


def test_no_two_of_48_lines_look_the_same():
    assert len({(figures.colour(index), figures.dash(index)) for index in range(48)}) == 48
