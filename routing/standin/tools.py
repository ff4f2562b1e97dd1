"""Tool calls: a request that requires one gets a call whose only argument is the generated text.

With ``tool_choice: auto`` the stand-in always generates text, so that tests know which of the two they get.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from routing.standin.errors import bad_request

MIN_CALL_TOKENS = 8  # of a generated argument; at most twice as many
_DEFAULT_ARGUMENT = "input"


class ToolCall(NamedTuple):
    """The tool that a request's output calls. Generated text needs no JSON escapes."""

    name: str
    argument: str

    @property
    def opening(self) -> str:
        """JSON before the generated text."""
        return f'{{{json.dumps(self.argument)}: "'

    @property
    def closing(self) -> str:
        """JSON after the generated text."""
        return '"}'

    def arguments(self, text: str) -> str:
        """The arguments as JSON."""
        return f"{self.opening}{text}{self.closing}"


def call_tokens(prompt: bytes) -> int:
    """Number of tokens of a call's argument; the same for the same prompt."""
    return MIN_CALL_TOKENS + xxh3_64_intdigest(prompt, MIN_CALL_TOKENS) % (MIN_CALL_TOKENS + 1)


def call_id(response_id: str, index: int) -> str:
    """The id of the call in one choice of a response."""
    return f"chatcmpl-tool-{xxh3_64_intdigest(response_id.encode(), index):016x}"


def read_call(body: dict[str, Any], prompt: bytes) -> ToolCall | None:
    """The tool that the output must call: the named one, or one chosen by the prompt; None if none is required."""
    choice = body.get("tool_choice")
    if choice != "required" and not isinstance(choice, dict):
        return None
    tools = body.get("tools")
    functions = [_function(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if not functions:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice == "required":
        return _call(functions[xxh3_64_intdigest(prompt) % len(functions)])
    name = _function(choice).get("name")
    for function in functions:
        if function.get("name") == name:
            return _call(function)
    raise bad_request("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """The function of a tool, in the format of the chat API or of the responses API."""
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _call(function: dict[str, Any]) -> ToolCall:
    """A call with the first required argument, else the first one."""
    parameters = function.get("parameters")
    schema = parameters if isinstance(parameters, dict) else {}
    names = [*(schema.get("required") or ()), *(schema.get("properties") or ()), _DEFAULT_ARGUMENT]
    return ToolCall(str(function.get("name")), str(names[0]))
