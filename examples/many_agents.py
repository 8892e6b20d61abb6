"""Several agents in processes of their own over one model, sharing the pages of one system prompt.

python examples/many_agents.py [agents]
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor

from kvd_client import Client

SYSTEM = "You are one of several careful reviewers of the same change. " * 30


def review(number: int) -> tuple[int, int, int, str]:
    """One agent's turn, in whichever process runs it."""
    with Client() as client:
        messages: list[dict[str, object]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Look at file {number}. What do you check first?"},
        ]
        result = client.chat(f"example-reviewer-{number}", messages, max_tokens=12)
        return number, result.cached_tokens, result.prompt_tokens, result.text


def main(agents: str = "4") -> None:
    """All at once; whoever comes second finds the system prompt's pages computed."""
    with ProcessPoolExecutor(max_workers=int(agents)) as pool:
        for number, cached, prompt, text in pool.map(review, range(int(agents))):
            print(f"reviewer {number}: {cached} of {prompt} prompt tokens reused: {text.strip()[:60]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
