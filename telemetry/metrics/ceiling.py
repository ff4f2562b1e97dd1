"""The block rounding limit: how many tokens of one prompt whole blocks can hold (H7).

The last token of a prompt is always computed, and hits end on a block: of ``n`` tokens at most
``floor((n - 1) / block) * block`` can come from the cache. What can be reused at all is the reachable share
(``telemetry/storage/reachable.py``).
"""


def cacheable_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens of one prompt that a perfectly warm cache could supply."""
    if prompt_tokens < 0 or block_tokens < 1:
        raise ValueError("a prompt has tokens >= 0 and a block tokens >= 1")
    return max(prompt_tokens - 1, 0) // block_tokens * block_tokens
