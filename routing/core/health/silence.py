"""When a replica has been silent for too long, though requests wait there: its engine hangs, while ``/health`` is well.

Theory of operation. Any byte of any answer is progress. Silence counts from the last one, or from when the oldest
waiting stream was sent there, whichever is later. Only streams count, for other answers are silent until they are
whole. Engines prefill in the order of arrival, so at the latest the oldest one's first byte must come, after its own
prefill: its uncached tokens at the measured rate, ``SLACK`` times over, are allowed on top of the setting. So a long
prompt has its time, and what waits behind it does not hide a hang. And what the pool shows by itself counts: a silence
that ended well is usual, and ``SLACK`` times the longest usual one is always allowed. Usual ones are forgotten by half
in ``HALF_LIFE_S``, so that one bad moment does not make the router blind for a day.

Where the engine's counters can be read and stand still, only one of its steps is allowed for, however long the prompt,
because each step moves them.
"""

from __future__ import annotations

from typing import Final

SLACK: Final = 3.0
UNMEASURED_RATE: Final = 1000.0  # tokens/s, while no replica has shown how fast it is: a slow one must not look hung
HALF_LIFE_S: Final = 300.0
STEP_TOKENS: Final = 8192  # that an engine prefills in one step at most: vLLM's default for API servers
UNMEASURED_STEP: Final = 1.5  # times stall_s that a step may take while no replica has shown how fast it is


class UsualSilence:
    """How long the replicas of one pool are silent and then go on."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._at_s = 0.0

    def ended(self, silence_s: float, now_s: float) -> None:
        """A silence of at least so many seconds ended with a byte."""
        if silence_s > self.longest_s(now_s):
            self._longest_s, self._at_s = silence_s, now_s

    def longest_s(self, now_s: float) -> float:
        """The longest of late, in seconds."""
        return self._longest_s * 0.5 ** ((now_s - self._at_s) / HALF_LIFE_S) if self._longest_s else 0.0

    def allowed_s(self, stall_s: float, tokens: int, tokens_per_s: float, now_s: float) -> float:
        """What a replica may be silent, whose oldest waiting stream has ``tokens`` to prefill at this rate."""
        return max(stall_s, SLACK * self.longest_s(now_s)) + prefill_allowance_s(tokens, tokens_per_s)

    def allowed_between_steps_s(
        self, stall_s: float, tokens: int, tokens_per_s: float, now_s: float, *, is_measured: bool
    ) -> float:
        """What the engine may take for one step, while a prompt of ``tokens`` waits; seconds."""
        step_s = prefill_allowance_s(min(tokens, STEP_TOKENS), tokens_per_s)
        if not is_measured:
            step_s = min(step_s, UNMEASURED_STEP * stall_s)
        return max(stall_s, SLACK * self.longest_s(now_s), step_s)


def prefill_allowance_s(tokens: float, tokens_per_s: float) -> float:
    """How long a prefill may take at a measured rate."""
    return SLACK * tokens / tokens_per_s
