"""Which pages a step can see: arithmetic of windows, for the pager, for admission and for `kvd bench capacity`.

A query at position p of a layer with a window of W tokens sees the keys p - W + 1 to p. The next step of a space of t
tokens begins at t, or, when the last token is replayed for its logits, at t - 1; so no key before t - W is seen any
more, and the pages that lie wholly before it are *behind the window*. May import nothing from kvd.
"""

from __future__ import annotations


def first_seen_page(tokens: int, window_tokens: int | None, page_tokens: int) -> int:
    """Number of the first page that the next step of a space of `tokens` tokens can see.

    Args:
        tokens: tokens that have KV.
        window_tokens: tokens a query sees, itself included; None for all.
        page_tokens: tokens of one page.
    """
    return 0 if window_tokens is None else max(0, tokens - window_tokens) // page_tokens


def most_pages(tokens: int, window_tokens: int | None, step_tokens: int, page_tokens: int) -> int:
    """The most pages of one group that are needed at once while a space grows to `tokens` tokens.

    A step of n tokens at t needs the pages that tokens t - W to t + n - 1 lie in; the worst place for so many tokens in
    a row begins with the last token of a page.

    Args:
        tokens: tokens at the end.
        window_tokens: tokens a query sees, itself included; None for all.
        step_tokens: the most tokens of a step.
        page_tokens: tokens of one page.
    """
    whole = -(-tokens // page_tokens)
    if window_tokens is None:
        return whole
    return min(whole, (window_tokens + step_tokens + page_tokens - 2) // page_tokens + 1)
