"""From a client's request to what placing it needs, and from what placing refuses to what the client gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from routing.core.limits.caps import may_exceed_defaults
from routing.core.prompt.bodies import BODIES
from routing.core.prompt.canonical import CanonicalPrompt
from routing.core.reading import BodyReading, read_body
from routing.core.request import PlacementRequest
from routing.core.types import BodyError, NoReplicaError, RoutingError, UnknownModelError
from routing.proxy.http.errors import RefusalError

if TYPE_CHECKING:
    from routing.proxy.clients.admission import Admission
    from routing.proxy.http.request import Request

PROMPT_PATHS: Final = {path.encode(): path for path in BODIES}
NO_PROMPT: Final = CanonicalPrompt(b"", 0, 0, [])
RETRY_AFTER_S: Final = 1  # seconds a client is asked to wait when the router cannot serve it now


def admitted_request(request: Request, admission: Admission, reading: BodyReading | None = None) -> PlacementRequest:
    """What there is to place of a client's request; RefusalError or RoutingError for what may not be sent.

    ``reading``: of its body, where that was read before.
    """
    head = request.head
    prompt_path = PROMPT_PATHS.get(head.path)
    if prompt_path is None:
        placement_request = PlacementRequest(None, head.task_group, head.session_id, NO_PROMPT, is_plain=True)
        return placement_request if admission.is_idle else admission.admitted(request, None, placement_request)
    if reading is None:
        reading = read_body(prompt_path, request.body)
    parsed = reading.body
    request.omits_usage, request.layout = reading.omits_usage, reading.layout
    named = parsed.model, head.task_group, head.session_id or reading.session_key
    placement_request = PlacementRequest(*named, reading.prompt, is_plain=reading.is_plain)
    if admission.is_idle and not may_exceed_defaults(parsed):
        return placement_request
    return admission.admitted(request, parsed, placement_request)


def refusal_of(error: RoutingError) -> RefusalError:
    """The client's fault is a 400 or 404; no replica is a 503 that may be tried again."""
    if isinstance(error, BodyError):
        return RefusalError(400, str(error), param=error.param)
    if isinstance(error, UnknownModelError):
        return RefusalError(404, str(error), param="model", kind="NotFoundError")
    if isinstance(error, NoReplicaError):
        return RefusalError(503, str(error), retry_after_s=RETRY_AFTER_S)
    return RefusalError(500, str(error))
