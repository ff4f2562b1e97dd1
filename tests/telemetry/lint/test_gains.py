"""What changing prompts would bring: constant text first, histories cut in big steps, whole blocks; no false alarms."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

import pytest

from routing.prompt.structure import DESCRIBED_BYTES
from telemetry.lint.differences import Kind
from telemetry.lint.findings import Finding, lint
from telemetry.lint.structure import PromptStructure
from tests.telemetry.lint.prompts import alternating, message, prose, rules, structure_of

RATE = 2.0  # requests per second
RULES, TASK, EXAMPLES = rules(1, 30), rules(2, 25), [prose(seed, 9) for seed in range(900, 908)]
DOCUMENTS = [prose(seed, 30) for seed in range(100, 140)]  # 1.5 KB each
TOOLS = [
    {"type": "function", "function": {"name": name, "description": rules(n, 6), "parameters": {"type": "object"}}}
    for n, name in enumerate(("read_file", "search", "run_tests"))
]


def question(seed: int) -> str:
    return prose(5000 + seed, 1 + seed % 3)


def context(seed: int, count: int = 3) -> str:
    """Retrieved documents, some of them in many prompts."""
    return "\n\n".join(random.Random(seed).sample(DOCUMENTS, count))


def found(prompts: list[PromptStructure]) -> dict[Kind, Finding]:
    findings = lint(prompts, RATE)
    assert len({finding.kind for finding in findings}) == len(findings)
    return {finding.kind: finding for finding in findings}


def conversations(
    count: int, turns: int, *, system: str = RULES, tail: Callable[[int], str] | None = None
) -> Iterator[list]:
    """The messages of each turn of some conversations, in turn."""
    histories = [[message("system", system)] for _ in range(count)]
    for turn in range(turns):
        for number, history in enumerate(histories):
            history.extend(alternating(prose(1000 * number + turn, 4)))
            yield [*history, *([message("system", tail(turn))] if tail else [])]
            history.append(message("assistant", prose(1000 * number + turn + 500, 10)))


LATE_CONSTANTS = {
    "instructions after retrieved text": lambda n: [
        *(message("system", "You help with contracts."), message("user", f"{context(n)}\n\n{TASK}")),
    ],
    "instructions after the question": lambda n: [message("user", f"{question(n)}\n\n{TASK}")],
    "retrieved text before instructions in the system prompt": lambda n: [
        *(message("system", f"{context(n)}\n\n{TASK}"), message("user", question(n))),
    ],
    "examples after retrieved text": lambda n: [
        *(
            message("system", RULES),
            message("user", context(n)),
            message("assistant", "Read."),
            *alternating(*EXAMPLES),
        ),
        message("user", question(n)),
    ],
}


@pytest.mark.parametrize("name", LATE_CONSTANTS)
def test_constant_text_after_changing_text_is_found_with_what_moving_it_brings(name):
    prompts = [structure_of(LATE_CONSTANTS[name](n)) for n in range(20)]
    constant = sum(map(len, EXAMPLES)) if name.startswith("examples") else len(TASK)

    (finding,) = lint(prompts, RATE)

    assert finding.kind is Kind.ORDER
    assert finding.segment == ("system" if "system prompt" in name else "user")
    assert 0.7 * constant / 4 < finding.stable_tokens <= constant / 4 + 100
    assert finding.share == 1.0
    assert finding.tokens_per_day == pytest.approx(finding.stable_tokens * RATE * 86_400)
    assert "Put constant text (instructions, tools, examples) first" in finding.advice
    assert finding.effect == "constant tokens after it cannot be shared"


def test_constant_text_at_the_end_of_a_long_prompt_is_found():
    prompts = [structure_of([message("user", f"{context(n, 26)}\n\n{TASK}")]) for n in range(12)]

    (finding,) = lint(prompts, RATE)

    assert prompts[0].length > DESCRIBED_BYTES + len(TASK)
    assert finding.kind is Kind.ORDER
    assert 0.7 * len(TASK) / 4 < finding.stable_tokens <= len(TASK) / 4


def test_a_date_in_front_and_late_instructions_are_two_findings():
    prompts = [
        structure_of(
            [message("system", f"Now: 2031-03-04 11:{n:02d}.\n{RULES}"), message("user", f"{context(n)}\n\n{TASK}")]
        )
        for n in range(20)
    ]

    both = found(prompts)

    assert set(both) == {Kind.DATE, Kind.ORDER}
    assert both[Kind.DATE].stable_tokens > both[Kind.ORDER].stable_tokens


def agent(number: int) -> list[list]:
    """Turns of an agent: calls of tools, whose results sometimes repeat."""
    rng, turns = random.Random(number), [[message("system", RULES), message("user", question(number))]]
    for step in range(6):
        arguments = {"name": "search", "arguments": f'{{"q": "{question(rng.randrange(9))}"}}'}
        calls = [{"id": f"call_{rng.getrandbits(40):x}", "type": "function", "function": arguments}]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        result = {"role": "tool", "content": DOCUMENTS[rng.randrange(6)], "tool_call_id": calls[0]["id"]}
        turns.append([*turns[step], call, result])
    return turns


GOOD = {
    "chat": lambda: list(conversations(10, 5)),
    "chat of one user": lambda: list(conversations(1, 20)),
    "one question each": lambda: [[message("system", RULES), message("user", question(n))] for n in range(30)],
    "retrieval with instructions first": lambda: [
        [message("system", RULES), message("user", f"{TASK}\n\nContext:\n{context(n)}\n\nQuestion: {question(n)}")]
        for n in range(40)
    ],
    "examples first": lambda: [
        [message("system", RULES), *alternating(*EXAMPLES), message("user", question(n))] for n in range(30)
    ],
    "two prompts of one group": lambda: [
        [message("system", (RULES, TASK)[n % 2]), message("user", question(n))] for n in range(30)
    ],
    "a short closing phrase": lambda: [
        [message("system", RULES), message("user", f"{question(n)}\n\nAnswer briefly and name your sources.")]
        for n in range(30)
    ],
    "histories cut to half": lambda: [
        [messages[0], *history_cut_to_half(messages[1:], 16)] for messages in conversations(2, 25)
    ],
}


def history_cut_to_half(history: list, limit: int) -> list:
    """The last messages; at the limit, half of them are dropped at once."""
    dropped = 0
    while len(history) - dropped > limit:
        dropped += limit // 2
    return history[dropped:]


@pytest.mark.parametrize("name", GOOD)
def test_good_prompts_have_no_finding(name):
    assert lint([structure_of(messages) for messages in GOOD[name]()], RATE) == []


def test_agents_with_tools_have_no_finding():
    sessions = [agent(number) for number in range(6)]
    turns = [(f"s{n}", session[step]) for step in range(7) for n, session in enumerate(sessions)]

    assert lint([structure_of(messages, tools=TOOLS, session=name) for name, messages in turns], RATE) == []
    assert lint([structure_of(messages, tools=TOOLS) for _, messages in turns], RATE) == []


WINDOW = 10  # messages
SLIDING = {
    "the system prompt is kept": lambda messages: [messages[0], *messages[1:][-WINDOW:]],
    "there is no system prompt": lambda messages: messages[1:][-WINDOW:],
    "the first message is kept too": lambda messages: [*messages[:2], *messages[2:][-WINDOW:]],
}


@pytest.mark.parametrize("name", SLIDING)
@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_history_that_loses_its_oldest_messages_with_each_turn_is_found(name, count):
    turns = list(conversations(count, 40 // count + WINDOW))[count * WINDOW // 2 :]
    prompts = [structure_of(SLIDING[name](messages)) for messages in turns][-60:]

    finding = found(prompts)[Kind.TRUNCATED]

    history = prompts[-1].length - prompts[-1].history[0].at
    assert finding.share > 0.5
    assert 0.5 * history / 4 < finding.stable_tokens < history / 4
    assert finding.tokens_per_day == pytest.approx(finding.stable_tokens * finding.share * RATE * 86_400)
    (per_turn,) = re.findall(r"about ([\d,]+) tokens a request", finding.advice)
    assert int(per_turn.replace(",", "")) == pytest.approx(
        175, rel=0.3
    )  # a question of 4 and an answer of 10 sentences
    assert "summary" in finding.advice


def test_a_long_history_counts_beyond_the_described_part():
    first = [prose(seed, 40) for seed in range(70)]  # 2 KB each
    windows = [[message("system", RULES), *alternating(*first[2 * turn : 2 * turn + 31])] for turn in range(12)]
    prompts = [structure_of(messages) for messages in windows]

    finding = found(prompts)[Kind.TRUNCATED]

    assert prompts[0].length > 1.5 * DESCRIBED_BYTES
    assert finding.stable_tokens > 0.8 * (prompts[0].length - len(RULES)) / 4


def tokens_of(*texts: str) -> int:
    """As a tokenizer might count: a token for four letters of a word; five for the frame of each message."""
    return sum(5 + sum(-(-len(word) // 4) for word in text.split()) for text in texts)


def first_turns(block: int, *, lines: int = 60, count: int = 30) -> list[PromptStructure]:
    """Questions after a system prompt."""
    system = rules(3, lines)
    texts = [prose(7000 + n, 1 + n % 12) for n in range(count)]
    return [
        structure_of(
            [message("system", system), message("user", text)],
            prompt_tokens=tokens_of(system, text) + 3,
            block_tokens=block,
        )
        for text in texts
    ]


def test_a_shared_beginning_that_ends_inside_a_large_block_is_found():
    shared = tokens_of(rules(3, 60)) + 5
    prompts = first_turns(512)

    (finding,) = lint(prompts, RATE)

    lost = shared % 512
    assert lost > 100
    assert finding.kind is Kind.ALIGNMENT
    assert abs(finding.at_tokens - shared) < 20
    assert abs(finding.stable_tokens - lost) < 20
    assert finding.tokens_per_day == pytest.approx(finding.stable_tokens * RATE * 86_400)
    assert (
        f"to {shared // 512 * 512 + 512:,}, or trim it by {finding.stable_tokens} to {shared // 512 * 512:,}"
        in finding.advice
    )
    assert "±" in finding.advice


def test_small_blocks_later_turns_and_engines_that_report_nothing_have_no_alignment_finding():
    assert lint(first_turns(16), RATE) == []  # at most 15 tokens
    assert lint(first_turns(512, count=7), RATE) == []
    turns = [
        structure_of(turn, prompt_tokens=900 + n, block_tokens=512)
        for n, turn in enumerate(conversations(8, 4))
        if n > 8
    ]
    assert lint(turns, RATE) == []
    silent = [message("system", rules(3, 60))]
    assert lint([structure_of([*silent, message("user", question(n))]) for n in range(30)], RATE) == []


def test_a_beginning_within_its_margin_of_a_block_boundary_has_no_alignment_finding():
    shared = tokens_of(rules(3, 60)) + 5

    assert lint(first_turns(shared - 2), RATE) == []
    assert lint(first_turns(shared + 2), RATE) == []
