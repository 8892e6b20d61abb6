"""`kvd bench`: every figure the README quotes."""

from __future__ import annotations

import click


@click.group()
def bench() -> None:
    """Measure: perplexity and bytes of the page formats (ppl), time to first token (ttft)."""
