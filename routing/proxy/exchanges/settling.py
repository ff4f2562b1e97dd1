"""What an answer that came whole says: of tokens, to rates and limits; of the replica, to its breaker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from routing.core.types import ReplicaId
from routing.proxy.exchanges.attempts import TOO_MANY
from routing.proxy.metrics.metrics import Outcome

if TYPE_CHECKING:
    from routing.core.loads.book import Ticket
    from routing.proxy.clients.access import Grant
    from routing.proxy.decisions.record import Record
    from routing.proxy.exchanges.delivery import Delivery
    from routing.proxy.router import Router

REPLICA_ERROR: Final = Outcome.REPLICA_ERROR


def settle(
    router: Router, grant: Grant | None, record: Record, ticket: Ticket, delivery: Delivery, *, was_probe: bool
) -> Outcome:
    """Tell everybody who asked; how the request counts. ``was_probe``: it tried a replica that was out."""
    usage = delivery.usage()
    record.used(usage)
    if grant is not None:
        grant.used(record.prompt_tokens_estimate, usage)
    if record.status is not None and record.status < 400:
        ttft_s = None if record.retries else record.ttft_s
        generated_tokens = None if usage is None else usage.generated
        ticket.answered(ttft_s, record.prompt_tokens, record.cached_tokens, generated_tokens)
    outcome = delivery.outcome()
    if router.breakers.troubled or outcome is REPLICA_ERROR:
        _judge(router, record, outcome, was_probe=was_probe)
    return outcome


def _judge(router: Router, record: Record, outcome: Outcome, *, was_probe: bool) -> None:
    """Tell the replica's breaker; of errors by status it has heard."""
    if record.status is None or record.status >= TOO_MANY:
        return
    if outcome is REPLICA_ERROR:
        router.failed(record.replica, "error in an answer of 200", was_probe=was_probe)
    else:
        router.breakers.completed(ReplicaId(record.replica), was_probe=was_probe)
