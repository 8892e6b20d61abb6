"""How many requests run at once by default: as many as memory holds, and no more than the device gains by. Pure.

Theory of operation. A decode step reads the weights once for all its rows, so rows are nearly free until arithmetic or
reading KV takes as long as the weights do. On a CPU the measured gain ends near eight rows; a GPU goes on for longer.
More rows than have their pages in RAM at once gain nothing: those beyond would wait in the line of `reserving`, with a
slot they cannot use. What an agent needs is not known before it comes; a context of `AGENT_TOKENS` is stated for it.
Agents that turn out larger wait for each other, smaller ones leave room for the pages of those that rest.

May import kvd.vm.window and kvd.quant.spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from kvd.quant.spec import PAGE_TOKENS
from kvd.vm.window import most_pages

AGENT_TOKENS: Final = 4096
"""The context for which each running agent is to have room; less where the model's is less."""

DEVICE_ROWS: Final = {"cpu": 8, "gpu": 32}
"""Rows beyond which a batch gains little, by kind of device."""


def default_max_batch(
    *,
    usable_bytes: int,
    groups: Sequence[tuple[int, int | None]],
    context_tokens: int,
    chunk_tokens: int,
    device: Literal["cpu", "gpu"],
) -> int:
    """Requests that run at once, at least 1.

    Args:
        usable_bytes: what all of them together may hold.
        groups: per cache group the bytes of a page, and the tokens a query sees (None for all).
        context_tokens: of the model.
        chunk_tokens: of a prefill step.
        device: what runs the model.
    """
    tokens = min(AGENT_TOKENS, context_tokens)
    agent_bytes = sum(
        page_bytes * most_pages(tokens, window, chunk_tokens, PAGE_TOKENS) for page_bytes, window in groups
    )
    return max(1, min(DEVICE_ROWS[device], usable_bytes // max(1, agent_bytes)))
