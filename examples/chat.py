"""A chat whose context survives everything: run it twice, or kill the daemon in between, and nothing is computed again.

python examples/chat.py [agent]
"""

from __future__ import annotations

import sys

from kvd_client import Client
from kvd_client.stream import Text


def main(agent: str = "example-chat") -> None:
    """Two turns, streamed; each says how much of its prompt was reused."""
    messages: list[dict[str, object]] = []
    with Client() as client:
        for question in ("What is a page table?", "And a page fault?"):
            messages.append({"role": "user", "content": question})
            with client.chat_stream(agent, messages, max_tokens=24) as stream:
                for event in stream:
                    if isinstance(event, Text):
                        print(event.text, end="", flush=True)
            result = stream.result
            print(f"\n[{result.match}: {result.cached_tokens} of {result.prompt_tokens} prompt tokens reused]")
            messages.append(dict(result.server["message"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
