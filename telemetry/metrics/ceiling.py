"""How high a hit rate could be at most (H7).

The last token of a prompt is always computed, and hits end on a block: of ``n`` tokens at most
``floor((n - 1) / block) * block`` can come from the cache.
"""

from collections.abc import Iterable


def cacheable_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens of one prompt that a perfectly warm cache could supply."""
    if prompt_tokens < 0 or block_tokens < 1:
        raise ValueError("a prompt has tokens >= 0 and a block tokens >= 1")
    return max(prompt_tokens - 1, 0) // block_tokens * block_tokens


def ceiling_ratio(prompts_tokens: Iterable[int], block_tokens: int) -> float | None:
    """Token-weighted ceiling of many prompts, 0 to 1; None for no tokens."""
    prompts = list(prompts_tokens)
    total = sum(prompts)
    return sum(cacheable_tokens(prompt, block_tokens) for prompt in prompts) / total if total else None
