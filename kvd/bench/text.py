"""Text for benchmarks that every CPython ships: about 465,000 characters of technical English."""

from __future__ import annotations

import pydoc_data.topics


def technical_english() -> str:
    """The help topics of the Python language, in a fixed order."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))
