"""Agents of one namespace map pages of the same text once; each goes on by itself, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import Cancelled
from kvd.ids import AgentId, Namespace, PageId
from kvd.model.tokenizer import TextCodec
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.requests import AgentRef
from kvd.scheduler.views import agent_info, statistics
from kvd.store.layout import page_of_file
from kvd.vm.text import Span, TypedText
from tests.scheduler.harness import World, content
from tests.scheduler.test_engine import Runner
from tests.support.prose import prose

AGENTS = 16
SYSTEM_PAGES = 6
SYSTEM = prose(SYSTEM_PAGES * PAGE_TOKENS + 40, "system")
"""What all agents begin with: six whole pages, and a part of the seventh."""


def own(name: str, tokens: int = 30) -> str:
    """What only one agent says."""
    return prose(tokens, f"own {name}")


def mapped(world: World, name: str) -> list[PageId]:
    """Sealed pages of an agent, of both groups."""
    return [*world.page_ids(name, 0), *world.page_ids(name, 1)]


def page_files(world: World) -> set[PageId]:
    """Pages that have a file."""
    found = (page_of_file(path.name) for path in world.fs.live_files() if path.suffix == ".safetensors")
    return {page for page in found if page is not None}


def test_sixteen_agents_hold_a_system_prompt_once(make_world: Callable[..., World]) -> None:
    """P18: RAM and disk have its pages once; each agent computes only its own part, and says what it was spared."""
    world = make_world(budget_pages=200)
    names = [f"agent-{number}" for number in range(AGENTS)]
    first = world.generate(names[0], SYSTEM + own(names[0]), max_tokens=2).turn
    assert (first.match, first.cached_tokens) == ("new", 0)
    for name in names[1:]:
        computed = world.core.stats.tokens_computed
        turn = world.generate(name, SYSTEM + own(name), max_tokens=2).turn
        whole = SYSTEM_PAGES * PAGE_TOKENS
        assert (turn.match, turn.cached_tokens) == ("new", whole)
        assert turn.match_reason == f"no stored text; {whole} tokens are in pages of the namespace"
        assert world.core.stats.tokens_computed - computed == turn.prompt_tokens - whole + 1
        assert turn.written_bytes < world.set_bytes, "pages that others wrote are not of this turn's making (P15)"
        assert turn.durable
        assert world.truth.is_greedy(world.agent(name).branch.tokens, turn.prompt_tokens)
    world.settle()
    assert len({tuple(mapped(world, name)) for name in names}) == 1
    assert len(page_files(world)) == 2 * SYSTEM_PAGES
    figures = statistics(world.core)
    assert figures["shared_pages"] == 2 * SYSTEM_PAGES
    assert figures["tokens_shared"] == figures["tokens_reused"] == (AGENTS - 1) * SYSTEM_PAGES * PAGE_TOKENS
    tail_tokens = sum(world.agent(name).branch.computed - SYSTEM_PAGES * PAGE_TOKENS for name in names)
    resident_bytes = SYSTEM_PAGES * world.set_bytes + tail_tokens * world.set_bytes // PAGE_TOKENS
    assert figures["resident_bytes"] == resident_bytes, "pages once, open tails by their length"
    info = agent_info(world.core, world.agent(names[3]))
    assert (info["shared_pages"], info["branches"]) == (2 * SYSTEM_PAGES, 1)


def test_deleting_the_first_keeps_what_others_map_and_the_last_frees_all(world: World) -> None:
    """Whoever computed a page has no more right to it than others; with the last agent its file goes, too."""
    for name in ("a", "b", "c"):
        world.generate(name, SYSTEM + own(name), max_tokens=1)
    pages = set(world.page_ids("a"))
    assert world.job("delete", "a").facts["deleted"]
    world.settle()
    assert pages <= page_files(world)
    world.job("evict", "b")
    again = world.generate("b", world.text("b") + " more", max_tokens=1).turn
    assert again.cached_tokens == again.prompt_tokens - again.appended_tokens - 1
    world.job("delete", "b")
    world.job("delete", "c")
    world.settle()
    assert page_files(world) == set()
    assert world.core.pager.statistics().resident_bytes == 0
    assert world.generate("d", SYSTEM, max_tokens=1).turn.cached_tokens == 0, "nothing is found that is gone"


def test_namespaces_learn_nothing_of_each_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """P19: in another namespace the same text counts as never seen, and its reply says nothing else."""
    world.generate("a", SYSTEM, max_tokens=1)
    elsewhere = AgentRef(Namespace("other"), AgentId("a"))
    monkeypatch.setattr("tests.scheduler.harness.ref_of", lambda name: elsewhere)
    turn = world.generate("a", SYSTEM, max_tokens=1).turn
    assert (turn.match, turn.match_reason, turn.cached_tokens) == ("new", "no stored text", 0)


def test_without_sharing_no_agent_maps_anothers_pages(make_world: Callable[..., World]) -> None:
    """`--sharing agent`: equal texts are computed and stored for each agent."""
    world = make_world(sharing="agent")
    for name in ("a", "b"):
        turn = world.generate(name, SYSTEM, max_tokens=1).turn
        assert (turn.match_reason, turn.cached_tokens) == ("no stored text", 0)
    assert not set(mapped(world, "a")) & set(mapped(world, "b"))


@pytest.mark.parametrize("modes", [("agent", "namespace"), ("namespace", "agent")])
def test_a_folder_written_with_the_other_setting_goes_on(
    make_world: Callable[..., World], modes: tuple[str, str]
) -> None:
    """Old pages keep the domain in their headers and are read as ever.

    Under `namespace` they are shared from then on; under `agent` what is shared stays so, and nothing new is.
    """
    world = make_world(sharing=modes[0])
    for name in ("a", "b"):
        world.generate(name, SYSTEM + own(name), max_tokens=2)
    world.settle()
    together = set(mapped(world, "a")) & set(mapped(world, "b"))
    assert bool(together) == (modes[0] == "namespace")
    world.sharing = modes[1]
    world.crash(lossy=False)
    for name in ("a", "b"):
        turn = world.generate(name, world.text(name) + own("next", 300), max_tokens=1).turn
        assert (turn.match, "page lost" in turn.match_reason) == ("extend", False)
        assert turn.cached_tokens >= SYSTEM_PAGES * PAGE_TOKENS
    assert together <= set(mapped(world, "a")) & set(mapped(world, "b"))
    new = world.generate("new", SYSTEM, max_tokens=1).turn
    assert new.cached_tokens == (SYSTEM_PAGES * PAGE_TOKENS if modes[1] == "namespace" else 0)
    world.settle()
    world.crash(lossy=True)
    assert not world.report.missing_pages


def test_a_crash_at_any_time_keeps_every_agent_and_every_page(make_world: Callable[..., World]) -> None:
    """P5: the first record of an agent names the pages it maps, so what others need survives the one who made it."""
    world = make_world()
    world.generate("a", SYSTEM + own("a"), max_tokens=2)
    world.generate("b", SYSTEM + own("b"), max_tokens=2)
    texts = {name: world.text(name) for name in ("a", "b")}
    world.crash()
    assert {name: world.text(name) for name in ("a", "b")} == texts
    shared = set(mapped(world, "a")) & set(mapped(world, "b"))
    assert len(shared) == 2 * SYSTEM_PAGES
    assert world.core.pager.statistics().shared_pages == len(shared)
    assert not world.report.orphans
    assert not world.report.missing_pages
    assert world.job("delete", "a").facts["deleted"]
    world.crash()
    world.settle()
    assert shared <= page_files(world)
    turn = world.generate("b", texts["b"], max_tokens=1).turn
    assert (turn.match, turn.cached_tokens) == ("exact", turn.prompt_tokens - 1)
    c = world.generate("c", SYSTEM, max_tokens=1).turn
    assert c.cached_tokens == SYSTEM_PAGES * PAGE_TOKENS, "the index is made anew from the logs"


def test_a_lost_shared_page_cuts_every_agent_that_maps_it(world: World) -> None:
    """P4: each is told, computes the gap from its own ids, and says what it would have said."""
    for name in ("a", "b"):
        world.generate(name, SYSTEM + own(name), max_tokens=1)
    world.settle()
    for name in ("a", "b"):
        world.job("evict", name)
    world.spoil_page(world.page_ids("a")[2])
    for name in ("a", "b"):
        turn = world.generate(name, world.text(name) + " go on", max_tokens=1).turn
        assert "page lost at token 512" in turn.match_reason
        assert turn.cached_tokens == 2 * PAGE_TOKENS
        assert world.truth.is_greedy(world.agent(name).branch.tokens, turn.prompt_tokens)
    fresh = world.generate("c", SYSTEM, max_tokens=1).turn
    assert fresh.cached_tokens == SYSTEM_PAGES * PAGE_TOKENS, "the pages that were computed again are found"


def test_an_agent_with_text_of_its_own_takes_what_reaches_further(world: World) -> None:
    """More of the prompt is in the namespace than in the agent's branches: the turn starts from there.

    The old branch stays, and the kind of the match is that of the agent's own text.
    """
    world.generate("a", SYSTEM, max_tokens=1)
    world.generate("b", SYSTEM[: len(SYSTEM) // 3], max_tokens=1)
    kept = world.text("b")
    turn = world.generate("b", SYSTEM, max_tokens=1).turn
    assert (turn.match, turn.cached_tokens) == ("diverge", SYSTEM_PAGES * PAGE_TOKENS)
    assert turn.match_reason.endswith(f"; {SYSTEM_PAGES * PAGE_TOKENS} tokens are in pages of the namespace")
    back = world.generate("b", kept, max_tokens=1).turn
    assert back.cached_tokens == back.prompt_tokens - 1, "the abandoned text is a hit (P16)"
    world.crash()
    assert world.generate("b", SYSTEM, max_tokens=1).turn.cached_tokens > SYSTEM_PAGES * PAGE_TOKENS


def test_what_is_appended_goes_on_from_where_the_agent_is(world: World) -> None:
    """An empty agent may begin with pages of others; one with text never leaves its branch by an append."""
    world.generate("a", SYSTEM + own("a"), max_tokens=1)
    begun = world.inject("b", SYSTEM).turn
    assert begun.cached_tokens == SYSTEM_PAGES * PAGE_TOKENS
    space = world.agent("b").branch.space
    world.inject("b", own("a"))
    assert world.agent("b").branch.space == space


def test_control_text_that_was_typed_shares_nothing(world: World) -> None:
    """The same bytes with another kind are another text."""
    data = SYSTEM.encode()
    world.generate("a", TypedText(data, (Span("control", 5), Span("content", len(data) - 5))), max_tokens=1)
    assert world.generate("b", content(data), max_tokens=1).turn.cached_tokens == 0


@pytest.mark.parametrize("window", [60, 200, 600])
def test_windows_share_too(make_world: Callable[..., World], window: int) -> None:
    """P31: the pages of a window before the border are read back, and nothing else of its group."""
    world = make_world(window=window)
    world.generate("a", SYSTEM + own("a", 400), max_tokens=1)
    world.settle()
    world.job("evict", "a")
    turn = world.generate("b", SYSTEM + own("b"), max_tokens=3).turn
    assert turn.cached_tokens == SYSTEM_PAGES * PAGE_TOKENS
    assert turn.swapped_in_pages == SYSTEM_PAGES + -(-(window - 1) // PAGE_TOKENS)
    world.check()
    alone = make_world(window=window)
    assert alone.generate("b", SYSTEM + own("b"), max_tokens=3).turn.text == turn.text


def test_pages_the_disk_refuses_are_nobody_elses_trouble(world: World) -> None:
    """P33: a page that cannot be written is not mapped by others, whose turns are durable."""
    world.refuse_writes()
    assert not world.generate("a", SYSTEM, max_tokens=1).turn.durable
    bad = set(mapped(world, "a"))
    world.heal()
    world.fs.fail = lambda number, name, path: 5 if any(page in str(path) for page in bad) else None
    turn = world.generate("b", SYSTEM, max_tokens=1).turn
    assert turn.durable
    assert not set(mapped(world, "b")) & set(world.core.memory.failed_writes)
    world.heal()


def test_a_refused_or_cancelled_turn_leaves_nothing_mapped(world: World) -> None:
    """What was planned and not carried out holds no page, and the agent is as it was (P34)."""
    world.generate("a", SYSTEM, max_tokens=1)
    spaces = world.core.pager.statistics().spaces
    assert world.generate("b", SYSTEM + own("b"), max_tokens=4000).error is not None
    for after in range(4):
        world.generate("b", SYSTEM + own("b"), max_tokens=1, cancel_after=after)
        if world.has("b"):
            world.job("delete", "b")
        assert world.core.pager.statistics().spaces == spaces
    assert statistics(world.core)["reserved_bytes"] == 0


# ---- at the same time -----------------------------------------------------------------------------------------------


@pytest.fixture
def make_runner(tmp_path: Path, codec: TextCodec) -> Iterator[Callable[..., Runner]]:
    """Makes engines with room for all agents, with a thread; at the end they are stopped."""
    runners: list[Runner] = []

    def make(**options: Any) -> Runner:
        defaults = {"max_queued": 64, "max_batch": AGENTS, "budget_bytes": 1 << 24}
        runner = Runner(tmp_path / str(len(runners)), codec, **{**defaults, **options})
        runners.append(runner)
        runner.start()
        return runner

    yield make
    for runner in runners:
        for answer in runner.answers:
            answer.wait()
        assert runner.look(lambda core: core.reservations.reserved_bytes + core.reservations.waiting) == 0
        runner.look(lambda core: core.pager.check_integrity())
        runner.stop()


def test_sixteen_agents_that_start_together_compute_it_once(make_runner: Callable[..., Runner]) -> None:
    """P18: the first one computes, the others wait for its pages and compute their own parts only."""
    runner = make_runner()
    answers = [runner.turn(f"agent-{n}", SYSTEM + own(str(n)), max_tokens=2) for n in range(AGENTS)]
    results = [answer.result for answer in answers]
    assert sorted(result["cached_tokens"] for result in results) == [0, *[SYSTEM_PAGES * PAGE_TOKENS] * (AGENTS - 1)]
    stats = runner.look(lambda core: core.stats)
    assert stats.tokens_shared == (AGENTS - 1) * SYSTEM_PAGES * PAGE_TOKENS
    assert stats.tokens_computed == sum(r["prompt_tokens"] - r["cached_tokens"] + 1 for r in results)


@pytest.mark.parametrize("cause", ["cancelled", "fails"])
def test_who_waits_goes_on_when_the_other_ends(make_runner: Callable[..., Runner], cause: str) -> None:
    """The one that computes ends in mid-prefill: another one computes the rest, and nobody waits for ever."""
    runner = make_runner(max_batch=4)
    waiting: list[Any] = []

    def act(event: Any) -> None:
        if event["type"] == "prefill" and event["done_tokens"] == 3 * 128:
            waiting.extend(runner.turn(name, SYSTEM + own(name), max_tokens=2) for name in ("b", "c"))
        if event["type"] == "prefill" and event["done_tokens"] == 8 * 128:
            if cause == "cancelled":
                runner.cancel(first)
            else:
                runner.model.fail_at = runner.model.steps + 1

    first = runner.turn("a", SYSTEM + own("a"), max_tokens=2, emit=act)
    assert isinstance(first.error, Cancelled) == (cause == "cancelled")
    cached = sorted(answer.result["cached_tokens"] for answer in waiting)
    assert cached == [4 * PAGE_TOKENS, SYSTEM_PAGES * PAGE_TOKENS]


def test_a_turn_that_waits_can_be_cancelled(make_runner: Callable[..., Runner]) -> None:
    """P34: at once, without the other one ending; nothing of it stays."""
    runner = make_runner(max_batch=4)
    waiting: list[Any] = []

    def act(event: Any) -> None:
        if event["type"] == "prefill" and event["done_tokens"] == 2 * 128:
            waiting.append(runner.turn("b", SYSTEM + own("b"), max_tokens=2))
        if event["type"] == "prefill" and event["done_tokens"] == 5 * 128:
            runner.cancel(waiting[0])
        if event["type"] == "prefill" and event["done_tokens"] == 8 * 128:
            order.append("waiting" if waiting[0].replies else "first")

    order: list[str] = []
    first = runner.turn("a", SYSTEM + own("a"), max_tokens=2, emit=act)
    assert first.result["cached_tokens"] == 0
    assert isinstance(waiting[0].error, Cancelled)
    assert order == ["waiting"]
    assert runner.look(lambda core: [agent.ref.agent for agent in core.agents]) == ["a"]


@pytest.mark.parametrize("who", ["computes", "waits"])
def test_preemption_and_waiting_for_pages_go_together(make_runner: Callable[..., Runner], who: str) -> None:
    """P33: who computes is swapped out, or who waits has to give its slot away: all say what they say alone."""
    alone = make_runner(max_batch=1)
    expected = {name: alone.turn(name, SYSTEM + own(name), max_tokens=3).result["text"] for name in ("a", "b")}
    runner = make_runner(max_batch=2)
    more: dict[str, Any] = {}

    def act(event: Any) -> None:
        if event["type"] == "prefill" and event["done_tokens"] == 2 * 128:
            priority = "background" if who == "waits" else "interactive"
            more["b"] = runner.turn("b", SYSTEM + own("b"), max_tokens=3, priority=priority)
        if event["type"] == "prefill" and event["done_tokens"] == 5 * 128:
            more["quick"] = runner.turn("quick", own("quick"), max_tokens=2)

    priority = "background" if who == "computes" else "interactive"
    first = runner.turn("a", SYSTEM + own("a"), max_tokens=3, emit=act, priority=priority)
    assert first.result["text"] == expected["a"]
    assert more["b"].result["text"] == expected["b"]
    assert more["quick"].result["completion_tokens"] == 2
    if who == "waits":
        assert more["b"].result["cached_tokens"] == SYSTEM_PAGES * PAGE_TOKENS, "it did not compute in vain"
