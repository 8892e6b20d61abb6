"""Cross-phase context: what one agent found is computed into others while they are idle, so that they start warm.

python examples/injection.py
"""

from __future__ import annotations

from kvd_client import Client


def main() -> None:
    """A researcher writes, two others get its words in the background, and go on from there."""
    with Client() as client:
        question: list[dict[str, object]] = [{"role": "user", "content": "List what a cache must never do."}]
        found = client.chat("example-researcher", question, max_tokens=32)
        minutes: dict[str, object] = {"role": "user", "content": f"Minutes of the last phase: {found.text}"}
        for part in client.inject_into(["example-writer", "example-critic"], messages=[minutes]):
            print(f"{part.agent}: {part.appended_tokens} tokens computed ahead, durable: {part.durable}")
        turn = client.chat(
            "example-writer", [minutes, {"role": "user", "content": "Write the summary."}], max_tokens=16
        )
        print(f"example-writer: {turn.cached_tokens} of {turn.prompt_tokens} prompt tokens were there already")


if __name__ == "__main__":
    main()
