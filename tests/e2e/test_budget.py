"""A budget much smaller than what the agents need: never exceeded, and nobody's text suffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd_client import errors
from kvd_client.stream import StreamEvent
from tests.support.daemon import Daemon, ageless, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

BUDGET_BYTES = 1_500_000
AGENTS = 10
"""Of four pages each: about three times the budget."""


@pytest.fixture(scope="module")
def small(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Daemon]:
    """A daemon with a budget of 14 pages."""
    with (
        short_folder() as folder,
        Daemon(folder, tiny_model_dir, ("--check", "--budget", "1.5MB"), zygote=zygote) as running,
    ):
        yield running


class Watcher:
    """Reads the figures all the time on a connection of its own, while a block runs. Owner: the test."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.samples: list[tuple[int, int]] = []

    def _watch(self) -> None:
        with self._daemon.new_client() as client:
            while not self._done.is_set():
                figures = client.call("statistics")
                self.samples.append((figures["resident_bytes"], figures["in_flight_bytes"]))

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()


def test_agents_that_exceed_the_budget_take_turns(small: Daemon) -> None:
    """P21: resident bytes and copies in flight never exceed the budget, and each agent's text is as with RAM for all.

    The twin of an agent is served from start to end in one go, so that its pages never leave RAM in between.
    """
    prompts = {f"turns-{i}": [prose(880 + 8 * i, i), prose(5, f"q{i}"), prose(5, f"r{i}")] for i in range(AGENTS)}
    expected: dict[str, list[str]] = {}
    for agent, parts in prompts.items():
        text = ""
        expected[agent] = []
        for part in parts:
            text += part
            expected[agent].append(small.client.generate(f"twin-{agent}", text, max_tokens=8).text)
            text += expected[agent][-1]
        small.client.delete(f"twin-{agent}")
    texts, known = dict.fromkeys(prompts, ""), dict.fromkeys(prompts, 0)
    before = small.statistics()
    with Watcher(small) as watcher:
        for turn in range(3):
            for agent, parts in prompts.items():
                result = small.client.generate(agent, texts[agent] + parts[turn], max_tokens=8)
                assert result.text == expected[agent][turn], (agent, turn)
                assert result.durable
                assert result.cached_tokens == known[agent]
                texts[agent] += parts[turn] + result.text
                known[agent] = small.client.agent_info(agent).computed_tokens
    after = small.statistics()
    assert len(watcher.samples) > AGENTS
    assert max(resident + in_flight for resident, in_flight in watcher.samples) <= BUDGET_BYTES
    assert after["peak_resident_bytes"] <= BUDGET_BYTES == after["budget_bytes"]
    assert after["frame_bytes"] <= BUDGET_BYTES
    # the agents did not fit: pages went out and came back
    total = sum(info.server["total_bytes"] for info in small.client.agents())
    assert total > 2 * BUDGET_BYTES
    assert after["evictions"] - before["evictions"] > AGENTS
    assert after["faults"] - before["faults"] > AGENTS
    assert after["load_failures"] == after["write_failures"] == 0


def test_a_request_that_can_never_fit_is_refused_with_both_figures(small: Daemon) -> None:
    """P22: refused before anything is computed or evicted for it; the agent is as it was and goes on."""
    client, text = small.client, prose(300, "fits")
    first = client.generate("fits", text, max_tokens=4)
    before, info = small.statistics(), ageless(client.agent_info("fits"))
    with pytest.raises(errors.BudgetExceeded) as refused:
        client.generate("fits", text + first.text + prose(3500, "more"), max_tokens=50)
    data = refused.value.data
    assert isinstance(data["needed_bytes"], int)
    assert (data["budget_bytes"], data["usable_bytes"]) == (BUDGET_BYTES, before["usable_bytes"])
    assert data["needed_bytes"] > before["usable_bytes"]
    assert str(data["needed_bytes"]) in refused.value.message
    assert str(data["usable_bytes"]) in refused.value.message
    with pytest.raises(errors.BudgetExceeded):
        client.inject("fits", prose(3500, "more"))
    after = small.statistics()
    assert ageless(client.agent_info("fits")) == info
    assert (after["tokens_computed"], after["evictions"]) == (before["tokens_computed"], before["evictions"])
    again = client.generate("fits", text + first.text, max_tokens=1)
    assert again.cached_tokens == again.prompt_tokens - 1


def test_the_longest_request_that_fits_runs(small: Daemon) -> None:
    """P21: an agent may use all that is usable, evicting everybody else, and decodes to the last byte of it."""
    small.client.inject("other", prose(300, "other"))
    model, usable = small.client.model_info(), small.statistics()["usable_bytes"]
    tokens = usable // model["page_bytes"] * 256
    text = prose(tokens - 20, "longest")
    result = small.client.generate("longest", text, max_tokens=20)
    assert result.finish_reason == "length"
    assert result.durable
    figures = small.statistics()
    assert figures["peak_resident_bytes"] <= BUDGET_BYTES
    assert small.client.agent_info("longest").resident_bytes > usable - model["page_bytes"]
    with pytest.raises(errors.BudgetExceeded):
        small.client.generate("longest", text + result.text, max_tokens=100)
    small.client.delete("longest")


def test_pins_leave_room_for_others(small: Daemon) -> None:
    """P21: a pin that would stop everybody else is refused with the figures; pins within bounds hold under pressure."""
    client = small.client
    client.inject("pin-1", prose(300, "pin-1"))
    client.pin("pin-1")
    client.inject("pin-2", prose(1200, "pin-2"))
    with pytest.raises(errors.BudgetExceeded, match="of the budget may be pinned"):
        client.pin("pin-2")
    assert not client.agent_info("pin-2").pinned
    for i in range(4):
        client.inject(f"pressure-{i}", prose(900, f"pressure-{i}"))
    assert client.agent_info("pin-1").swapped_pages == 0
    assert small.statistics()["peak_resident_bytes"] <= BUDGET_BYTES
    client.delete("pin-1")
    assert small.statistics()["pinned_bytes"] == 0


def test_prefetch_never_takes_more_than_there_is(small: Daemon) -> None:
    """P21: hints for more agents than fit load what fits and leave the budget whole."""
    for i in range(6):
        small.client.inject(f"hint-{i}", prose(800, f"hint-{i}"))
    for i in range(6):
        small.client.prefetch(f"hint-{i}")
    with Watcher(small) as watcher:
        results = [small.client.generate(f"hint-{i}", prose(800, f"hint-{i}"), max_tokens=2) for i in range(6)]
    assert [result.cached_tokens for result in results] == [799] * 6
    assert max(resident + in_flight for resident, in_flight in watcher.samples) <= BUDGET_BYTES


def test_a_branch_that_was_left_makes_room_and_flipping_back_to_it_is_a_hit(small: Daemon) -> None:
    """P12, P16: a divergence holds nothing of the other branch in RAM; going back reads its pages and computes none.

    Back and forth, to the token.
    """
    client = small.client
    common = prose(520, "common")
    left, right = common + prose(330, "left"), common + prose(40, "right")

    def branches() -> list[dict[str, Any]]:
        return list(client.residency("flips")["agents"][0]["branches"])

    def resident(branch: dict[str, Any]) -> list[bool]:
        (segment,) = branch["segments"]
        return [page["resident"] for page in segment["pages"]]

    first = client.generate("flips", left, max_tokens=2)
    away = client.generate("flips", right, max_tokens=2)
    assert away.match == "diverge"
    assert 510 <= away.cached_tokens <= 521, "the common part, to the token where it ends"
    for i in range(3):
        client.inject(f"squeeze-{i}", prose(1700, f"squeeze-{i}"))
    old = next(branch for branch in branches() if not branch["current"])
    assert not any(resident(old)), "nothing holds a branch that was left"
    before = small.statistics()
    back = client.generate("flips", left + first.text + prose(6, "on"), max_tokens=2)
    after = small.statistics()
    assert (back.match, back.cached_tokens) == ("extend", first.prompt_tokens + 1), "all but the pending token"
    assert after["tokens_computed"] - before["tokens_computed"] == back.prompt_tokens - back.cached_tokens + 1
    assert after["faults"] > before["faults"]
    again = client.generate("flips", right + away.text, max_tokens=1)
    assert (again.match, again.cached_tokens) == ("exact", again.prompt_tokens - 1)
    there = client.generate("flips", left + first.text + prose(6, "on") + back.text, max_tokens=1)
    assert (there.match, there.cached_tokens) == ("exact", there.prompt_tokens - 1)
    for name in ("flips", *(f"squeeze-{i}" for i in range(3))):
        client.delete(name)


SMALL_BYTES = 1_000_000
"""Of nine pages: one agent of the tests below, not two."""


def test_the_budget_moves_under_running_turns(small: Daemon) -> None:
    """P21, P22: shrunk, turns run one after the other with their own texts; what never fits ends with both figures.

    The command line and both clients set the same budget; raised again, what was computed is a hit.
    """
    client, prompts = small.client, [prose(700, f"moves-{i}") for i in range(2)]
    expected = [client.generate(f"alone-{i}", text, max_tokens=60).text for i, text in enumerate(prompts)]
    with small.new_client() as first, small.new_client() as second, small.new_client() as third:
        streams = [
            each.generate_stream(f"moves-{i}", text, max_tokens=60)
            for i, (each, text) in enumerate(zip((first, second), prompts, strict=True))
        ]
        events = [iter(stream) for stream in streams]  # held, so that looking at the first ones leaves no stream
        assert all(until_text(each) for each in events)
        shrunk = client.configure(budget="1MB")
        assert (shrunk.budget_bytes, shrunk.start_budget_bytes) == (SMALL_BYTES, BUDGET_BYTES)
        assert shrunk.until_restart == ("budget",)
        assert [stream.result.text for stream in streams] == expected
        told = small.cli("budget", "--json").json
        assert (told["budget_bytes"], told["converging"]) == (SMALL_BYTES, [])
        assert told["resident_bytes"] <= SMALL_BYTES
        assert small.statistics()["frame_bytes"] <= SMALL_BYTES
        grown = small.cli("budget", "1_500_000")
        assert (grown.code, grown.stderr) == (0, "")
        assert "budget     1.5 MB" in grown.stdout
        large = third.generate_stream("large", prose(1900, "large"), max_tokens=60)
        beginning = iter(large)
        assert until_text(beginning)
        client.configure(budget=SMALL_BYTES)
        with pytest.raises(errors.BudgetExceeded) as refused:
            _ = large.result
        needed, usable = refused.value.data["needed_bytes"], refused.value.data["usable_bytes"]
        assert isinstance(needed, int)
        assert isinstance(usable, int)
        assert needed > usable == client.configure().usable_bytes
        assert client.configure(budget="1.5MB").until_restart == ()
    again = client.generate("large", prose(1900, "large"), max_tokens=0)
    assert again.cached_tokens == 1900


def until_text(events: Iterator[StreamEvent]) -> StreamEvent:
    """Take events up to the first text; the stream goes on."""
    return next(event for event in events if event.type == "text")


def test_a_bad_budget_is_refused_with_the_allowed_values(small: Daemon) -> None:
    """P39: by the daemon, which alone knows what the machine can hold; nothing changes."""
    before = small.client.configure()
    assert before.largest_budget_bytes is not None
    for value in ("much", "0.5MB", before.largest_budget_bytes + 1):
        with pytest.raises(errors.InvalidParams, match="budget"):
            small.client.configure(budget=value)
    refused = small.cli("budget", "0.5MB")
    assert refused.code == 2
    assert "SIZE must be from 1 MB to " in refused.stderr
    assert "of the machine's" in refused.stderr
    assert small.cli("budget", "--namespace-quota", "nonsense").code == 2
    assert small.client.configure().budget_bytes == before.budget_bytes
