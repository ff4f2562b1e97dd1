from __future__ import annotations

import pytest

from routing.health.slowness import SILENCE_HALF_LIFE_S, TypicalSilence


def test_a_short_prompt_may_be_silent_for_as_long_as_the_setting_says() -> None:
    assert TypicalSilence().allowed_s(3.0, 80, 8000.0, 0.0) == pytest.approx(3.03)


def test_a_long_prompt_has_its_time() -> None:
    """128,000 tokens at the default rate of 8,000 tokens/s take 16 s: three times that is no hang."""
    assert TypicalSilence().allowed_s(3.0, 128_000, 8000.0, 0.0) == pytest.approx(51.0)


def test_what_is_usual_is_allowed_three_times_over_and_forgotten_by_half() -> None:
    usual = TypicalSilence()
    usual.record(4.0, 0.0)
    assert usual.allowed_s(3.0, 0, 8000.0, 0.0) == pytest.approx(12.0)
    assert usual.allowed_s(3.0, 0, 8000.0, SILENCE_HALF_LIFE_S) == pytest.approx(6.0)
    assert usual.allowed_s(3.0, 0, 8000.0, 10 * SILENCE_HALF_LIFE_S) == 3.0


def test_a_shorter_silence_does_not_hide_a_longer_one_of_late() -> None:
    usual = TypicalSilence()
    usual.record(8.0, 0.0)
    usual.record(1.0, 1.0)
    assert usual.longest_s(1.0) == pytest.approx(8.0, rel=0.01)
    usual.record(3.0, 2 * SILENCE_HALF_LIFE_S)
    assert usual.longest_s(2 * SILENCE_HALF_LIFE_S) == 3.0
