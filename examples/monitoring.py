"""What a monitor asks a daemon: is it well, who is in RAM, what is shared; then it looks on while an agent works.

python examples/monitoring.py
"""

from __future__ import annotations

import threading

from kvd_client import Client, MonitorPicture
from kvd_client.monitor import SHARED

AGENT = "monitored"


def look(client: Client) -> None:
    """One look at everything. Asked again with `picture.version`, the daemon tells only what changed."""
    health = client.health()
    print(f"status {health.status}, ready {health.ready}")
    picture = MonitorPicture()
    picture.take(client.monitor(picture.version))
    figures = picture.figures
    print(
        f"RAM {figures['resident_bytes']:,} of {figures['budget_bytes']:,} bytes, disk {figures['swap_bytes']:,} bytes"
    )
    for (namespace, name), agent in picture.agents.items():
        runs = [
            run for branch in agent["branches"] for each in branch["segments"] for run in picture.pages(each["runs"])
        ]
        shared = sum(pages for _, flags, pages in runs if flags & SHARED)
        print(
            f"{namespace}/{name}: {agent['state']}, {agent['tokens']} tokens, "
            f"{agent['resident_pages']} of {agent['pages']} pages in RAM, {shared} shared"
        )


def work(client: Client) -> None:
    """Something to look at: a turn, one whose text parts from it, and an eviction."""
    text = "The quick brown fox jumps over the lazy dog. " * 30
    client.generate(AGENT, text, max_tokens=4)
    client.generate(AGENT, text[:600] + "And then?", max_tokens=4)
    client.evict(AGENT)
    client.delete(AGENT)


def main() -> None:
    """Look, then follow what happens until the agent is deleted."""
    with Client() as client, client.subscribe(agent=AGENT) as events:
        look(client)
        worker = threading.Thread(target=work, args=(client,))
        worker.start()
        for event in events:
            if event.type == "miss":
                print(f"miss: {event.data['match_reason']}")
                parted = event.data["divergence"]
                if isinstance(parted, dict):
                    print(f"  it had {parted['expected']!r}, and got {parted['found']!r}")
            elif event.type in ("eviction", "fault", "swap_out"):
                print(f"{event.type}: {event.data['pages']} pages, {event.data['bytes']:,} bytes")
            elif event.type == "operation" and event.data["operation"] == "delete":
                break
        worker.join()


if __name__ == "__main__":
    main()
