"""What a monitor asks a daemon: is it well, who is in RAM, what is shared, what was moved.

python examples/monitoring.py
"""

from __future__ import annotations

from kvd_client import Client


def main() -> None:
    """One look at everything."""
    with Client() as client:
        health = client.health()
        print(f"status {health.status}, ready {health.ready}")
        figures = client.statistics()
        print(f"RAM {figures.resident_bytes:,} of {figures.budget_bytes:,} bytes, disk {figures.swap_bytes:,} bytes")
        for agent in client.agents():
            print(
                f"{agent.agent}: {agent.tokens} tokens, {agent.resident_bytes:,} bytes in RAM, durable {agent.durable}"
            )
        for entry in client.call("residency")["agents"]:
            pages = [page for branch in entry["branches"] for each in branch["segments"] for page in each["pages"]]
            shared = sum(page["shared_by"] > 1 for page in pages)
            print(f"{entry['agent']}: {len(pages)} sealed pages, {shared} of them shared")


if __name__ == "__main__":
    main()
