"""A full disk quota: room comes from what is worth least, newer turns become durable, and text is never the price."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from kvd.scheduler import registry
from kvd.scheduler.commit import sweep
from kvd.scheduler.requests import AgentRef
from kvd.scheduler.shedding import _by_value
from kvd.scheduler.sleepers import Sleepers
from kvd.scheduler.upkeep import Upkeep
from kvd.scheduler.views import agent_info, statistics
from kvd.scheduler.waiting import never
from kvd.scheduler.waking import wake
from kvd.store.errors import QuotaExceeded
from kvd.store.fs import folder_bytes
from kvd.store.sleeping import READ_AGENTS, SleepingAgent
from kvd.store.swap_ops import AppendRecordOp, SwapResult
from kvd.store.swap_store import SwapStore
from tests.scheduler.harness import ROOT, Outcome, World, ref_of
from tests.scheduler.test_turn import text_of


def fill(world: World, names: Iterable[str], lines: int = 40) -> dict[str, str]:
    """Agents with their own texts, durable; returns the texts."""
    texts = {}
    for name in names:
        prompt = f"{name} says: {text_of(lines)}"
        texts[name] = prompt + world.generate(name, prompt).turn.text
        world.settle()
    return texts


def tighten(world: World, *, free_bytes: int) -> None:
    """From here on the quota is what is used now and a little more."""
    store = world.swap._store
    assert isinstance(store, SwapStore)
    usage = store._usage
    usage.recount()
    usage._clock = lambda: world.now_s
    usage.quota_bytes = usage.used_bytes + free_bytes
    usage.recount()
    usage.quota_bytes += usage.reserved_bytes


def until_saved(world: World) -> None:
    """Time passes until nothing is unsaved."""
    for _ in range(60):
        world.settle()
        world.save_unsaved()
        if all(agent.unsaved is None for agent in world.core.agents):
            return
    raise AssertionError([agent.unsaved for agent in world.core.agents])


def test_the_agent_used_longest_ago_pays_and_keeps_its_text(make_world: Callable[..., World]) -> None:
    """P25 P8: the quota holds, the new turn is durable in the end, what was given up is logged, no text is lost."""
    world = make_world()
    texts = fill(world, "abc")
    tighten(world, free_bytes=30_000)
    new = world.generate("d", f"d says: {text_of(60)}")
    texts["d"] = f"d says: {text_of(60)}" + new.turn.text
    until_saved(world)
    given_up = world.events("kv_given_up")
    assert given_up
    assert all(facts["agents"] == ["default/a"] for facts in given_up[:1]), given_up
    assert int(str(statistics(world.core)["pages_given_up"])) > 0
    assert agent_info(world.core, world.agent("d"))["durable"]
    store = world.swap._store
    assert isinstance(store, SwapStore)
    assert folder_bytes(world.fs, ROOT) <= store.statistics().quota_bytes
    world.crash()
    for name, text in texts.items():
        assert world.text(name) == text
    again = world.generate("a", texts["a"]).turn
    assert "are computed again" in again.match_reason
    assert world.generate("d", texts["d"]).turn.cached_tokens > 500


def test_an_agents_tail_goes_before_its_head(make_world: Callable[..., World]) -> None:
    """P14: what remains of the agent is its beginning, which is reused to the token."""
    world = make_world()
    texts = fill(world, "a", lines=90) | fill(world, "b")
    tighten(world, free_bytes=30_000)
    world.generate("c", f"c says: {text_of(25)}")
    until_saved(world)
    given_up = int(str(statistics(world.core)["pages_given_up"]))
    assert 0 < given_up < 2 * len(world.page_ids("a"))
    turn = world.generate("a", texts["a"]).turn
    assert turn.cached_tokens >= 256, turn.match_reason


def test_branches_that_are_not_current_go_first(make_world: Callable[..., World]) -> None:
    """P25: a divergence's old branch is worth less than anything that somebody is at."""
    world = make_world()
    texts = fill(world, "ab")
    changed = texts["b"][: len(texts["b"]) // 3] + " but then " + text_of(40)
    texts["b"] = changed + world.generate("b", changed).turn.text
    world.settle()
    texts |= fill(world, "c")
    tighten(world, free_bytes=30_000)
    world.generate("d", f"d says: {text_of(20)}")
    until_saved(world)
    assert [facts["agents"] for facts in world.events("kv_given_up")][:1] == [["default/b"]]
    for name in "ab":
        turn = world.generate(name, texts[name]).turn
        assert turn.cached_tokens == turn.prompt_tokens - 1, (name, turn.match_reason)


def test_pinned_unsaved_and_last_used_agents_keep_everything(make_world: Callable[..., World]) -> None:
    """Nobody pays for a turn that nothing can be given up for: it says why it is not durable, and lives in RAM."""
    world = make_world(budget_pages=80)
    texts = fill(world, "ab")
    for name in "ab":
        assert world.job("pin", name).facts["durable"]
    tighten(world, free_bytes=20_000)
    outcome = world.generate("c", f"c says: {text_of(60)}")
    assert not outcome.turn.durable
    assert "quota" in str(outcome.turn.durable_reason)
    for _ in range(5):
        world.settle()
        world.save_unsaved()
    assert not world.events("kv_given_up")
    for name, text in texts.items():
        turn = world.generate(name, text).turn
        assert turn.cached_tokens == turn.prompt_tokens - 1


def restart_asleep(world: World) -> None:
    """Start again so that nobody's log is read."""
    world.settle()
    world.read_agents = 0
    world.crash(lossy=False)


def test_agents_that_sleep_pay_before_those_that_are_awake(make_world: Callable[..., World]) -> None:
    """P25: they were used before everybody who is awake; who pays is woken later with its text, and computes again."""
    world = make_world()
    texts = fill(world, "ab")
    restart_asleep(world)
    assert len(world.core.agents.asleep) == 2
    texts |= fill(world, "cd")
    tighten(world, free_bytes=20_000)
    for name in "ef":
        prompt = f"{name} says: {text_of(50)}"
        texts[name] = prompt + world.generate(name, prompt).turn.text
        until_saved(world)
    paid = [agent for facts in world.events("kv_given_up") for agent in facts["agents"]]
    assert paid == sorted(paid), "the one used longest ago first, and nobody again who has nothing left"
    assert {"default/a", "default/b"} <= set(paid) <= {"default/a", "default/b", "default/c"}
    assert not any(agent.page_ids for agent in world.core.agents.asleep.values())
    world.read_agents = READ_AGENTS
    world.crash()
    for name, text in texts.items():
        assert world.text(name) == text
    turn = world.generate("d", texts["d"]).turn
    assert turn.cached_tokens == turn.prompt_tokens - 1


def test_a_page_that_a_sleeper_shares_is_not_given_up_for_an_awake_agent(make_world: Callable[..., World]) -> None:
    """P25: it goes with the most valuable of those who map it, and sleepers count."""
    world = make_world()
    fill(world, "a")
    assert world.job("fork", "a", new_agent="z").error is None
    world.settle()
    shared = set(world.page_ids("a") + world.page_ids("a", 1))
    restart_asleep(world)
    core = world.core
    assert world.drive(wake(core, [ref_of("a")], never), Outcome()).error is None
    fill(world, "bc")
    assert world.has("a")
    assert set(core.agents.asleep) == {ref_of("z")}
    ranked = [(ref.agent, page) for ref, page, _ in _by_value(core)]
    assert {("a", page) for page in shared} <= set(ranked), "the awake one was used later"
    core.agents.waking.add(ref_of("z"))  # whoever is being woken is nobody to take from
    assert shared.isdisjoint(page for _, page, _ in _by_value(core))


def test_only_pages_that_are_given_up_leave_memory(make_world: Callable[..., World]) -> None:
    """P14: the rest of the branch, shared pages among it, stays where it was."""
    world = make_world()
    texts = fill(world, "a", lines=90) | fill(world, "b")
    resident = agent_info(world.core, world.agent("a"))["resident_pages"]
    tighten(world, free_bytes=30_000)
    world.generate("c", f"c says: {text_of(25)}")
    until_saved(world)
    given_up = int(str(statistics(world.core)["pages_given_up"]))
    assert given_up > 0
    assert agent_info(world.core, world.agent("a"))["resident_pages"] == int(str(resident)) - given_up
    assert world.generate("a", texts["a"]).turn.cached_tokens >= 256


def test_a_shortage_from_before_there_was_room_is_forgotten(make_world: Callable[..., World]) -> None:
    """P25: refusals that came in while files were being given up say nothing of the quota as it is afterwards."""
    world = make_world()
    fill(world, "abc")
    world.settle()
    store = world.core.store
    refuse(world, over_bytes=1)
    world.tick()
    assert len(world.events("kv_given_up")) == 1
    refuse(world, over_bytes=1 << 30)
    world.settle()
    assert len(world.events("kv_given_up")) == 1
    assert store.take_shortage() is None


def refuse(world: World, *, over_bytes: int) -> None:
    """The quota refuses a record of somebody."""
    error = QuotaExceeded(used_bytes=over_bytes, wanted_bytes=100, quota_bytes=100)
    world.core.store._note_health(SwapResult(AppendRecordOp(None), error, 0.0))  # type: ignore[arg-type]


def diverge(world: World, name: str, text: str) -> None:
    """Leave pages that only a branch which was let go of maps."""
    world.generate(name, text[:100] + " but then " + text_of(30))
    agent = world.agent(name)
    for branch in agent.other_branches:
        world.core.close_branch(agent, branch)
    assert agent.dropped_bytes


def test_a_compaction_is_counted_on_once_and_goes_ahead_of_requests(make_world: Callable[..., World]) -> None:
    """P25: a daemon that is never idle makes it; where the quota refuses it, agents pay, and then it is made."""
    world = make_world()
    texts = fill(world, "abc")
    diverge(world, "b", texts["b"])
    world.generate("c", texts["c"])
    agent, upkeep = world.agent("b"), Upkeep(world.core, lambda: world.now_s, 1.0)
    while world.step_store():
        pass
    agent.compaction_due = False
    assert upkeep.next_job(idle=False) is None
    refuse(world, over_bytes=1)
    world.tick()
    assert not world.events("kv_given_up"), "the compaction frees as much"
    assert upkeep.next_job(idle=False) == (agent.ref, "compact")
    store = world.swap._store
    assert isinstance(store, SwapStore)
    admit = store._admit

    def full(wanted_bytes: int, *, kept_bytes: int = 0) -> None:
        raise QuotaExceeded(used_bytes=100, wanted_bytes=wanted_bytes, quota_bytes=100)

    store._admit = full  # type: ignore[method-assign]
    world.job("compact", "b")
    store._admit = admit  # type: ignore[method-assign]
    assert world.events("log_not_compacted")
    assert upkeep.next_job(idle=False) is None, "not again and again"
    refuse(world, over_bytes=1)
    world.tick()
    assert world.events("kv_given_up")
    while world.step_store():
        pass
    assert upkeep.next_job(idle=True) == (agent.ref, "compact")
    world.job("compact", "b")
    sweep(world.core)
    assert (agent.dropped_bytes, agent.counted_on) == (0, False)


class CountedSleepers(Sleepers):
    """Sleepers that count what is put into their index.

    Attributes:
        indexed_pages: pages that ever were, one for each sleeper that maps them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.indexed_pages = 0

    def _index(self, ref: AgentRef, agent: SleepingAgent) -> None:
        super()._index(ref, agent)
        self.indexed_pages += len(agent.page_ids)


def test_a_shortage_looks_at_sleepers_once(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """P25: who maps which page is known from the first shortage on; later ones index only what changed."""
    monkeypatch.setattr(registry, "Sleepers", CountedSleepers)
    world = make_world()
    fill(world, "abcd")
    restart_asleep(world)
    asleep = world.core.agents.asleep
    assert isinstance(asleep, CountedSleepers)
    everything = sum(len(agent.page_ids) for agent in asleep.values())
    assert asleep.indexed_pages == 0, "a start does not pay for it"
    refuse(world, over_bytes=1)
    world.tick()
    assert asleep.indexed_pages == everything > 0
    world.settle()
    after_one = asleep.indexed_pages
    assert after_one < 2 * everything
    for _ in range(3):
        refuse(world, over_bytes=1 << 30)  # nobody has so much: all is looked at
        world.tick()
    assert asleep.indexed_pages == after_one
    assert world.drive(wake(world.core, [ref_of("d")], never), Outcome()).error is None
    assert asleep.indexed_pages == after_one
    for page in {page for agent in asleep.values() for page in agent.page_ids}:
        assert set(asleep.who_maps(page)) == {ref for ref, agent in asleep.items() if page in agent.page_ids}
