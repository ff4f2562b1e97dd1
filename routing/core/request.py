"""What placing a request needs to know of it."""

from __future__ import annotations

from routing.core.prompt.canonical import CanonicalPrompt


class PlacementRequest:
    """A request to be placed."""

    __slots__ = ("group", "is_plain", "key", "key_groups", "model", "prompt", "session_key", "tenant")

    def __init__(
        self,
        model: str | None,
        group: str | None,
        session_key: str | None,
        prompt: CanonicalPrompt,
        tenant: str = "",
        key: str | None = None,
        key_groups: tuple[str, ...] | None = None,
        *,
        is_plain: bool = False,
    ) -> None:
        self.model = model
        self.group = group  # the task group that the client named
        self.session_key = session_key
        self.prompt = prompt
        self.tenant = tenant  # the salt of its API key's tenant; "" without one
        self.key = key  # the name of its API key
        self.is_plain = is_plain  # no byte of its response will come with the first token: not streamed, or no tokens
        self.key_groups = key_groups  # the task groups that the key is good for; None: all
