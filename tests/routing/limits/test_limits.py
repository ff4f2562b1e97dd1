"""Token buckets, the retry budget and concurrency limits never allow more than their rates."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.limits.budgets import WINDOW_S, Budget, RetryBudget
from routing.limits.concurrency import MIN_FLOWS, MIN_TOKENS, RAISED_AT_ONCE, ConcurrencyLimiter, RejectionCause
from routing.schema import ConcurrencyConfig, ObjectiveMissed

steps = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=100)


@given(steps, st.floats(0.1, 10), st.integers(1, 20))
def test_a_budget_allows_at_most_the_burst_and_the_rate(steps, per_s, burst):
    budget, now, spent, dearest = Budget(per_s, burst, 0.0), 0.0, 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if not budget.wait_s(now):
            budget.spend(amount, now)
            spent += amount
            dearest = max(dearest, amount)

    assert spent <= burst + now * per_s + dearest + 1e-6


@given(steps, st.floats(0.1, 10), st.integers(1, 20))
def test_units_are_available_after_the_reported_wait(steps, per_s, burst):
    budget, now = Budget(per_s, burst, 0.0), 0.0
    for pause, amount in steps:
        now += pause
        budget.spend(amount, now)
        assert budget.wait_s(now + budget.wait_s(now)) == pytest.approx(0.0, abs=1e-6)


def test_an_overdrawn_budget_refills_to_its_capacity():
    budget = Budget(2.0, 10, 0.0)
    budget.spend(15, 0.0)

    assert (budget.available(0.0), budget.wait_s(0.0), budget.full_in_s(0.0)) == (0, 3.0, 7.5)
    assert (budget.available(3.0), budget.wait_s(3.0)) == (1, 0.0)
    assert budget.available(1e9) == 10


def test_a_new_rate_adds_no_units():
    for capacity, left in ((100, 3), (2, 2)):
        budget = Budget(1.0, 10, 0.0)
        budget.spend(8, 0.0)
        budget.configure(1.0, capacity, 0.0)
        assert budget.available(1.0) == left


def test_a_new_rate_applies_from_now_on():
    budget = Budget(1.0, 10, 0.0)
    budget.spend(10, 0.0)
    budget.configure(100.0, 100, 5.0)

    assert (budget.available(5.0), budget.available(5.5)) == (5, 55)


def spend_all(budget: RetryBudget) -> int:
    count = 0
    while budget.spend():
        count += 1
    return count


def test_the_floor_applies_without_traffic():
    budget = RetryBudget(0.2, 10)
    assert spend_all(budget) == 10 * WINDOW_S
    assert budget.rejected == 1


def test_old_traffic_and_retries_do_not_count():
    budget = RetryBudget(0.2, 1)
    budget.tick(100, 0)
    budget.tick(101, 10_000)
    spend_all(budget)
    for second in range(102, 103 + WINDOW_S):
        budget.tick(second, 10_000)
    assert spend_all(budget) == WINDOW_S


def test_retries_stay_below_ratio_and_floor():
    chance = random.Random(7)
    budget, requests, tries, now = RetryBudget(0.2, 10), 0, 0, 50.0
    for _ in range(4000):
        now += 0.25
        requests += chance.randrange(200)
        budget.tick(now, requests)
        tries += spend_all(budget)  # every request fails
    assert tries <= 0.2 * requests + 10 * (now - 50.0) + 10 * WINDOW_S
    assert tries >= 0.19 * requests, "the budget allows almost all permitted retries"


# --- concurrency limits ---


@dataclass(eq=False)
class QueuedRequest:
    priority: int = 0
    flow: str = ""
    prompt_tokens: int = 0
    weight: float = 1.0
    latest_start: float = math.inf
    events: list[str] = field(default_factory=list)

    def admit(self) -> None:
        self.events.append("admitted")

    def on_rejected(self, _: ConcurrencyLimiter, cause: RejectionCause) -> None:
        self.events.append(cause)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def build_limiter(
    running: int = 1, waiting: int = 2, wait_s: float = 10.0, clock: Clock | None = None
) -> ConcurrencyLimiter:
    return ConcurrencyLimiter(
        ConcurrencyConfig(max_running=running, max_waiting=waiting, max_wait_s=wait_s), clock or Clock()
    )


def end_oldest(limiter: ConcurrencyLimiter) -> QueuedRequest:
    """End the request that was admitted first."""
    request = next(iter(limiter._running))
    limiter.release(request)
    assert isinstance(request, QueuedRequest)
    return request


@pytest.mark.parametrize(("priority", "rejected"), [(0, 5), (4, 5), (5, 5), (9, 9)])
def test_a_full_queue_rejects_the_newest_request_of_the_least_urgent_priority(priority, rejected):
    limiter = build_limiter()
    requests = [QueuedRequest(), QueuedRequest(5), QueuedRequest(1), QueuedRequest(priority)]
    assert [limiter.acquire(request) for request in requests] == [True, False, False, False]
    assert [request.priority for request in requests if request.events] == [rejected]
    assert bool(requests[1].events) == (priority < 5), "of the same priority, the newest"
    assert (limiter.waiting, limiter.rejected[RejectionCause.FULL]) == (2, 1)


def test_a_full_queue_keeps_a_request_that_has_become_most_urgent_by_waiting():
    clock = Clock()
    limiter = build_limiter(1, 4, 10.0, clock)
    requests = [QueuedRequest(flow="a"), QueuedRequest(9, "a"), *(QueuedRequest(0, "a") for _ in range(3))]
    for request in requests:
        limiter.acquire(request)
        clock.now = 5.0 if len(limiter._waiting) == 1 else clock.now
    limiter.admit()
    limiter.acquire(QueuedRequest(0, "b"))
    assert [bool(request.events) for request in requests] == [False, False, False, False, True]


def test_a_waiter_is_rejected_after_the_longest_wait():
    clock = Clock()
    limiter = build_limiter(clock=clock)
    first, second = QueuedRequest(3), QueuedRequest(0)
    limiter.acquire(QueuedRequest())
    limiter.acquire(first)
    clock.now = 5.0
    limiter.acquire(second)
    clock.now = 10.0
    limiter.expire()
    assert (first.events, second.events, limiter.waiting) == ([RejectionCause.TIMEOUT], [], 1)


def test_new_limits_admit_waiters_at_once():
    limiter, requests = build_limiter(1, 9), [QueuedRequest() for _ in range(5)]
    for request in requests:
        limiter.acquire(request)
    limiter.configure(ConcurrencyConfig(max_running=3))
    assert (limiter.running, limiter.waiting) == (3, 2)
    limiter.remove_limit()
    assert (limiter.running, limiter.waiting) == (5, 0)
    limiter.configure(ConcurrencyConfig(max_running=1))
    assert limiter.acquire(QueuedRequest()) is False, "a lower limit removes no running request and admits no new one"


def test_retry_after_follows_the_pace():
    clock = Clock()
    limiter = build_limiter(1, 100, clock=clock)
    for _ in range(31):
        limiter.acquire(QueuedRequest())
    assert limiter.retry_after_s == 1
    for _ in range(2):
        clock.now += 0.5
        end_oldest(limiter)
    assert limiter.retry_after_s == 15  # 0.5 s each for 28 waiters and the new request
    clock.now += 1e6
    end_oldest(limiter)
    assert limiter.retry_after_s == 60


def test_the_pace_is_measured_at_the_limit_only():
    clock = Clock()
    limiter = build_limiter(2, 100, clock=clock)
    for _ in range(2):
        for _ in range(6):
            limiter.acquire(QueuedRequest())
        for _ in range(6):
            clock.now += 0.5
            end_oldest(limiter)
        for _ in range(3):
            limiter.acquire(QueuedRequest())
            clock.now += 1000.0
            end_oldest(limiter)
    for _ in range(30):
        limiter.acquire(QueuedRequest())

    assert limiter.retry_after_s == 15, "0.5 s each for 28 waiters and the new request"


def test_a_share_of_the_limits_is_at_least_one():
    limiter = ConcurrencyLimiter(ConcurrencyConfig(max_running=10, max_waiting=3), Clock(), share=0.25)
    assert [limiter.acquire(QueuedRequest()) for _ in range(5)] == [True] * 3 + [False] * 2
    assert limiter.waiting == 1


def test_counts_are_correct_after_any_sequence():
    rng, clock = random.Random(2), Clock()
    limiter = build_limiter(4, 6, 3.0, clock)
    admitted: list[QueuedRequest] = []
    waiting: list[QueuedRequest] = []
    for _ in range(20_000):
        clock.now += rng.random()
        operation = rng.randrange(4)
        if operation == 0 and admitted:
            limiter.release(admitted.pop(rng.randrange(len(admitted))), (rng.randrange(99), rng.randrange(99)))
        elif operation == 1 and waiting:
            limiter.cancel(waiting.pop(rng.randrange(len(waiting))))
        elif operation == 2:
            limiter.expire()
        else:
            request = QueuedRequest(rng.randrange(10), rng.choice("abc"), rng.randrange(99))
            if limiter.acquire(request):
                admitted.append(request)
            else:
                waiting.append(request)
        admitted += [request for request in waiting if request.events == ["admitted"]]
        waiting = [request for request in waiting if not request.events]
        assert (limiter.running, limiter.waiting) == (len(admitted), len(waiting))
        assert limiter.running <= 4
        assert limiter.waiting <= 6
        assert not limiter.waiting or limiter.running == 4, "no request waits while a permit is free"


# --- fairness ---

costs = st.integers(MIN_TOKENS, 1000)


@given(st.lists(st.tuples(st.lists(costs, min_size=20, max_size=20), st.sampled_from([0.5, 1.0, 4.0])), min_size=2))
def test_flows_that_wait_get_work_by_their_weights(flows):
    limiter = build_limiter(1, 10_000)
    limiter.acquire(QueuedRequest(flow="before"))
    for tokens, weight in flows:
        for cost in tokens:
            limiter.acquire(QueuedRequest(0, f"{id(tokens)}", cost, weight))
    end_oldest(limiter)
    admitted = dict.fromkeys((f"{id(tokens)}" for tokens, _ in flows), 0.0)
    left = dict.fromkeys(admitted, 20)
    dearest = {f"{id(tokens)}": max(tokens) / weight for tokens, weight in flows}
    while min(left.values()):
        request = end_oldest(limiter)
        admitted[request.flow] += request.prompt_tokens / request.weight
        left[request.flow] -= 1
        for one, other in itertools.combinations(admitted, 2):
            assert abs(admitted[one] - admitted[other]) <= dearest[one] + dearest[other] + 1e-6


def test_a_flow_is_charged_for_what_its_requests_really_were():
    limiter = build_limiter(4, 10_000)
    work = {"short": 100, "long": 1000}
    done = dict.fromkeys(work, 0)
    for flow in work:
        for _ in range(1000):
            limiter.acquire(QueuedRequest(0, flow, 50))
    for _ in range(1000):
        request = next(iter(limiter._running))
        assert isinstance(request, QueuedRequest)
        done[request.flow] += work[request.flow]
        limiter.release(request, (50, work[request.flow] - 50))
    assert done["short"] == pytest.approx(done["long"], rel=0.05)


@given(st.integers(1, 9), st.integers(1, 8), st.lists(costs, min_size=40, max_size=40), st.integers(0, 39))
def test_a_request_of_any_priority_is_among_the_next_once_it_has_waited_for_half_of_the_limit(
    priority, others, tokens, waits_behind
):
    clock = Clock()
    limiter = build_limiter(1, 10_000, 10.0, clock)
    limiter.acquire(QueuedRequest())
    modest = QueuedRequest(priority, "modest", tokens[0])

    def arrive(number: int) -> None:
        limiter.acquire(QueuedRequest(0, f"urgent-{number % others}", tokens[number % 40]))

    for number in range(waits_behind + others):
        arrive(number)
    limiter.acquire(modest)
    clock.now = 4.9
    for number in range(30):
        arrive(number)
        end_oldest(limiter)
    assert not modest.events
    clock.now = 5.0
    for number in range(others + 1):
        arrive(number)
        end_oldest(limiter)
    assert modest.events == ["admitted"], "only one request of each other flow goes first"


@given(st.lists(st.tuples(st.sampled_from("abcde"), costs), min_size=30, max_size=80))
def test_a_full_queue_rejects_the_newest_request_of_the_flow_with_the_most_work_waiting(arrivals):
    limiter, waiting = build_limiter(1, 10), list[QueuedRequest]()
    limiter.acquire(QueuedRequest())
    for flow, tokens in arrivals:
        waiting.append(QueuedRequest(0, flow, tokens))
        limiter.acquire(waiting[-1])
        work = Counter[str]()
        for request in waiting:
            work[request.flow] += request.prompt_tokens
        for rejected in [request for request in waiting if request.events]:
            waiting.remove(rejected)
            assert work[rejected.flow] >= max(work.values()) >= work.total() / len(work)
            assert all(request is not rejected for request in waiting)
        assert len(waiting) == limiter.waiting <= 10
    while waiting:
        end_oldest(limiter)
        waiting = [request for request in waiting if not request.events]


@pytest.mark.parametrize("on_missed", list(ObjectiveMissed))
def test_requests_with_an_objective_go_first_in_their_flow_while_it_can_be_kept(on_missed):
    clock = Clock()
    config = ConcurrencyConfig(max_running=1, max_wait_s=100.0, on_objective_missed=on_missed)
    limiter = ConcurrencyLimiter(config, clock)
    limiter.acquire(QueuedRequest())
    latest = {"plain": math.inf, "late": 3.0, "tight": 8.0, "loose": 20.0, "gone": 6.0}
    requests = {name: QueuedRequest(0, "a", 100, latest_start=start) for name, start in latest.items()}
    requests["of another flow"] = QueuedRequest(0, "b", 100)
    for request in requests.values():
        limiter.acquire(request)
    limiter.cancel(requests["gone"])
    clock.now = 4.0
    limiter.expire()
    order: list[str] = []
    while limiter.waiting:
        end_oldest(limiter)
        order += [name for name, request in requests.items() if request.events == ["admitted"] and name not in order]
    is_shed = on_missed is ObjectiveMissed.SHED
    assert requests["late"].events == ([RejectionCause.OBJECTIVE] if is_shed else ["admitted"])
    assert order == ["tight", "of another flow", "loose", "plain"] + ([] if is_shed else ["late"])


def test_a_flow_that_pauses_gets_no_credit_for_the_past():
    limiter = build_limiter(1, 1000)
    limiter.acquire(QueuedRequest(flow="pauses", prompt_tokens=100))
    for _ in range(100):
        limiter.acquire(QueuedRequest(flow="busy", prompt_tokens=100))
    for _ in range(50):
        end_oldest(limiter)
    for _ in range(50):
        limiter.acquire(QueuedRequest(flow="pauses", prompt_tokens=100))
    assert Counter(end_oldest(limiter).flow for _ in range(20))["busy"] >= 10


# --- corrections ---


def backlog(limiter: ConcurrencyLimiter, flow: str, count: int) -> None:
    for _ in range(count):
        limiter.acquire(QueuedRequest(0, flow, 100))


def end_newest(limiter: ConcurrencyLimiter, count: int) -> list[str]:
    """End the request that was admitted last, this many times; their flows."""
    ended: list[str] = []
    for _ in range(count):
        ended.append(next(reversed(limiter._running)).flow)
        limiter.release(next(reversed(limiter._running)))
    return ended


def test_a_long_response_is_not_charged_for_what_its_flow_left_to_others_meanwhile():
    limiter = build_limiter(2, 10_000)
    long = QueuedRequest(0, "light", 16)
    limiter.acquire(long)
    backlog(limiter, "busy", 1000)
    end_newest(limiter, 500)  # 50,000 tokens
    backlog(limiter, "light", 1)
    end_newest(limiter, 2)
    limiter.release(long, (16, 50_000))
    backlog(limiter, "light", 1)
    assert "light" in end_newest(limiter, 5)


def test_an_estimate_that_the_virtual_time_has_passed_is_not_given_back():
    limiter = build_limiter(2, 10_000)
    short = QueuedRequest(0, "lucky", 100_000)
    limiter.acquire(short)
    backlog(limiter, "busy", 2000)
    end_newest(limiter, 1500)
    backlog(limiter, "lucky", 500)
    limiter.release(short, (16, 0))
    assert Counter(end_newest(limiter, 400))["busy"] == pytest.approx(200, abs=5)


def test_an_idle_limiter_forgives_what_responses_cost_beyond_their_estimates():
    limiter = build_limiter(1, 1000)
    long = QueuedRequest(flow="a")
    limiter.acquire(long)
    limiter.release(long, (100_000, 0))
    backlog(limiter, "b", 100)
    backlog(limiter, "a", 1)
    assert "a" in end_newest(limiter, 4)


def test_a_corrected_flow_waits_behind_its_new_tag_only():
    limiter = build_limiter(2, 1000)
    dear, next_one = QueuedRequest(0, "a", 10_000), QueuedRequest(0, "a", 100)
    limiter.acquire(QueuedRequest(0, "busy"))
    limiter.acquire(dear)
    limiter.acquire(next_one)
    backlog(limiter, "busy", 200)
    limiter.cancel(next_one)
    limiter.release(dear, (100, 0))
    backlog(limiter, "a", 1)
    assert "a" in end_newest(limiter, 6)


def test_disconnecting_before_the_usage_is_reported_saves_nothing():
    clock = Clock()
    limiter, tokens = build_limiter(4, 20_000, 1e6, clock), Counter[str]()
    for number in range(16):
        request = QueuedRequest(0, ("leaves", "stays")[number % 2], 10)
        limiter.acquire(request)
        clock.now += 0.1 if request.flow == "leaves" else 10.0
        limiter.release(request, (10, 1 if request.flow == "leaves" else 1000))
    for _ in range(2000):
        backlog(limiter, "leaves", 1)
        backlog(limiter, "stays", 1)
    for _ in range(1000):
        clock.now += 2.5
        request = next(iter(limiter._running))
        limiter.release(request, None if request.flow == "leaves" else (100, 1000))
        tokens[request.flow] += 1000
    assert tokens["leaves"] <= 1.2 * tokens["stays"]


@pytest.mark.parametrize("priority", [0, 9])
def test_a_request_without_objective_is_next_in_its_flow_once_it_has_waited_for_half_of_the_limit(priority):
    clock, plain = Clock(), QueuedRequest(priority, "a", 100)
    limiter = build_limiter(1, 100, 10.0, clock)
    limiter.acquire(QueuedRequest())
    limiter.acquire(plain)
    for _ in range(52):
        limiter.acquire(QueuedRequest(0, "a", 100, latest_start=clock.now + 5))
        clock.now += 0.1
        end_oldest(limiter)
    assert plain.events == ["admitted"]


def test_flows_that_are_forgotten_leave_nothing():
    limiter = build_limiter(1, 1000)
    backlog(limiter, "busy", 2)
    for number in range(5000):
        request = QueuedRequest(9, f"{number}")
        limiter.acquire(request)
        limiter.cancel(request)
    assert len(limiter._flows) <= 2 * MIN_FLOWS
    assert len(limiter._lanes[9]) <= 2 * MIN_FLOWS


@pytest.mark.parametrize("left", [0, 1000])
def test_objectives_of_requests_that_have_left_are_forgotten_but_not_each_time(left):
    clock = Clock()
    limiter = build_limiter(1, 10_000, 10.0, clock)
    limiter.acquire(QueuedRequest())
    for number in range(5100):
        request = QueuedRequest(9, latest_start=1e6 + number)
        limiter.acquire(request)
        if number >= left:
            limiter.cancel(request)
    assert left + MIN_FLOWS / 2 < len(limiter._flows[""].lanes[9].due) <= 2 * left + MIN_FLOWS + 1
    clock.now = 5.0
    limiter.admit()
    assert len(limiter._ageing) == max(0, left - RAISED_AT_ONCE), "few become most urgent in one call"
