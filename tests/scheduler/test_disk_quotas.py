"""Quotas of the disk by namespace: who is over pays from its own, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvd.ids import Namespace
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.limits import LimitChange, LimitSettings
from kvd.scheduler.upkeep import MAX_SAVE_WAIT_S, Upkeep
from kvd.scheduler.views import agent_info, health_facts, statistics
from kvd.scheduler.waiting import no_room
from kvd.store.errors import QuotaExceeded
from kvd.store.swap_store import SwapStore
from tests.scheduler.harness import World, ref_of
from tests.scheduler.porting import bring, export
from tests.scheduler.test_shedding import fill, restart_asleep, until_saved
from tests.scheduler.test_turn import text_of

MakeWorld = Callable[..., World]
WORK, PLAY = Namespace("work"), Namespace("play")


def used(world: World) -> dict[str, int]:
    """What the store says that namespaces take, which is what their files take."""
    store = world.swap._store
    assert isinstance(store, SwapStore)
    store.idle()
    files = world.fs.live_files()
    found: dict[str, int] = {}
    for page_id, header in store._pages.items():
        found[header.namespace] = found.get(header.namespace, 0) + len(files[world.page_path(page_id)])
    for agent in world.core.agents:
        if agent.logged:
            size = len(files[world.log_path(str(agent.ref))])
            found[agent.ref.namespace] = found.get(agent.ref.namespace, 0) + size
    for ref in world.core.agents.asleep:
        found[ref.namespace] = found.get(ref.namespace, 0) + len(files[world.log_path(str(ref))])
    assert dict(store.statistics().namespace_bytes) == found
    return found


def set_quota(world: World, quota_bytes: int | None, namespace: Namespace = WORK) -> None:
    """As `configure` does."""
    world.core.limits.change(LimitChange(namespace_disk_quotas={namespace: quota_bytes}))


def given_up_of(world: World) -> set[str]:
    """Whose pages were given up."""
    return {agent for facts in world.events("kv_given_up") for agent in facts["agents"]}  # type: ignore[attr-defined]


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """A world in which any quota may be set."""
    return make_world(limits=LimitSettings(least_bytes=1), budget_pages=120)


@pytest.mark.parametrize("sharing", ["namespace", "agent"])
def test_a_namespace_that_is_over_pays_from_its_own(make_world: MakeWorld, sharing: str) -> None:
    """P25: the quota holds, the new turn is durable in the end, others lose nothing although they were used before."""
    world = make_world(limits=LimitSettings(least_bytes=1), budget_pages=120, sharing=sharing)
    texts = fill(world, ["play/p", "work/a", "work/b"])
    quota_bytes = used(world)["work"] + 30_000
    set_quota(world, quota_bytes)
    new = f"work/c says: {text_of(45)}"
    texts["work/c"] = new + world.generate("work/c", new).turn.text
    until_saved(world)
    assert given_up_of(world) == {"work/a"}
    assert agent_info(world.core, world.agent("work/c"))["durable"]
    assert used(world)["work"] <= quota_bytes
    assert health_facts(world.core)["disk"] == "ok"
    assert not world.core.pager.writes_fail
    world.crash()
    assert {name: world.text(name) for name in texts} == texts
    set_quota(world, quota_bytes)  # files that came back with the power go again
    world.settle()
    assert used(world)["work"] <= quota_bytes
    turn = world.generate("play/p", texts["play/p"]).turn
    assert turn.cached_tokens == turn.prompt_tokens - 1


def test_where_nothing_can_go_a_turn_says_why_and_others_are_served(world: World) -> None:
    """P25 P33: durable false with the namespace and its quota, health names it; more room, and it is saved."""
    fill(world, ["work/a"])
    assert world.job("pin", "work/a").facts["durable"]
    set_quota(world, used(world)["work"] + 1_000)
    turn = world.generate("work/b", f"work/b says: {text_of(60)}").turn
    assert not turn.durable
    assert "the disk quota of namespace 'work'" in str(turn.durable_reason)
    for _ in range(3):
        world.settle()
        world.save_unsaved()
    short = world.inject("work/c", "short").turn
    assert (short.durable, "the disk quota" in str(short.durable_reason)) == (False, True), "a record needs room, too"
    world.tick()
    assert not world.events("kv_given_up")
    assert health_facts(world.core)["disk_quotas_full"] == ["work"]
    assert health_facts(world.core)["disk"] == "ok"
    figures = statistics(world.core)["namespaces"]
    assert isinstance(figures, dict)
    assert figures["work"]["waiting_bytes"] > 0
    assert world.generate("play/p", f"play/p says: {text_of(60)}").turn.durable
    assert world.core.limits.facts()["until_restart"] == ["namespace_disk_quotas"]
    set_quota(world, None)
    until_saved(world)
    world.tick()
    assert health_facts(world.core)["disk_quotas_full"] == []
    text = world.text("work/b")
    world.crash()
    assert world.text("work/b") == text


def test_who_finds_memory_full_is_told_of_its_own_namespace_alone(world: World) -> None:
    """P19: what others have no room for is said to be others', in no name."""
    fill(world, ["work/a"])
    world.job("pin", "work/a")
    set_quota(world, used(world)["work"] + 1_000)
    world.generate("work/b", f"work/b says: {text_of(60)}")
    assert set(world.core.pager.quota_held_bytes) == {WORK}
    own, others = (no_room(world.core, namespace).message for namespace in (WORK, PLAY))
    assert own == "memory is full of pages for which there is no room in the disk quota of namespace 'work'"
    assert others == "memory is full of pages for which there is no room in disk quotas of other namespaces"


def test_a_full_namespace_holds_up_no_other(world: World) -> None:
    """P25: agents that wait for room in a quota stand in no other namespace's line, and make its tries no rarer."""
    upkeep = Upkeep(world.core, lambda: world.now_s, 1.0)
    fill(world, ["work/a"])
    assert world.job("pin", "work/a").facts["durable"]
    set_quota(world, used(world)["work"] + 1_000)
    for number in range(5):
        assert not world.generate(f"work/w{number}", text_of(60), max_tokens=1).turn.durable
    world.agent("work/w0").last_save = -1

    def try_one() -> str | None:
        job = upkeep.next_job(idle=False)
        if job is None:
            return None
        upkeep.save_ended(job[0], durable=bool(world.job("save", str(job[0])).facts["durable"]))
        return str(job[0])

    assert try_one() == "work/w0"
    assert try_one() is None, "nobody of the namespace is tried in its turn"
    world.refuse_writes()
    assert not world.generate("play/p", text_of(2), max_tokens=1).turn.durable
    world.heal()
    assert try_one() == "play/p", "at once, although work waits"
    assert agent_info(world.core, world.agent("play/p"))["durable"]
    waits = []
    for _ in range(6):
        began = world.now_s
        while try_one() is None:
            world.now_s += 1.0
        waits.append(world.now_s - began)
    assert waits == [1, 2, 4, 8, 16, MAX_SAVE_WAIT_S]
    assert try_one() is None
    set_quota(world, None)
    saved = [try_one() for _ in range(5)]
    assert set(saved) == {f"work/w{number}" for number in range(5)}, "another quota is worth a try at once"
    assert all(agent.unsaved is None for agent in world.core.agents)


def test_who_can_never_fit_costs_the_others_nothing(world: World) -> None:
    """P25: an agent larger than its quota waits, and health says why; idle ones keep their KV."""
    texts = fill(world, ["work/a", "work/b", "work/c"])
    quota_bytes = used(world)["work"]
    set_quota(world, quota_bytes)
    assert not world.generate("work/large", f"large says: {text_of(120)}").turn.durable
    for _ in range(5):
        world.settle()
        world.save_unsaved()
        world.tick()
    assert not world.events("kv_given_up")
    assert health_facts(world.core)["disk_quotas_too_small"] == ["work"]
    (told,) = world.events("disk_quota_too_small")
    assert "nothing is given up" in str(told["reason"])
    turn = world.generate("work/a", texts["work/a"]).turn
    assert turn.cached_tokens == turn.prompt_tokens - 1
    assert world.job("delete", "work/large").error is None
    until_saved(world)
    world.tick()
    assert health_facts(world.core)["disk_quotas_too_small"] == []


def test_logs_above_the_quota_cost_no_kv(world: World) -> None:
    """P25: text is never given up, so nothing that may go would help; a quota that is taken back is no trouble."""
    fill(world, ["work/a", "work/b"])
    set_quota(world, 1)
    for _ in range(3):
        world.settle()
        world.tick()
    assert not world.events("kv_given_up")
    assert health_facts(world.core)["disk_quotas_too_small"] == ["work"]
    set_quota(world, None)
    world.tick()
    assert health_facts(world.core)["disk_quotas_too_small"] == []


def test_agents_shorter_than_a_page_are_saved_under_a_quota(world: World) -> None:
    """P25 P8: KV in logs is given up as pages are, used longest ago first; text and ids stay."""
    texts = fill(world, [f"work/s{number}" for number in range(4)], lines=12)
    assert not world.page_ids("work/s0")
    quota_bytes = used(world)["work"]
    set_quota(world, quota_bytes)
    for number in range(4, 8):
        texts |= fill(world, [f"work/s{number}"], lines=12)
        until_saved(world)
        assert used(world)["work"] <= quota_bytes
    (first, *_) = world.events("open_pages_given_up")
    assert "work/s0" in first["agents"]  # type: ignore[operator]
    assert world.agent("work/s0").branch.computed == 0
    assert world.agent("work/s7").branch.computed == len(world.agent("work/s7").branch.tokens) - 1
    assert not world.events("log_not_compacted")
    world.crash()
    assert {name: world.text(name) for name in texts} == texts
    turn = world.generate("work/s0", texts["work/s0"]).turn
    assert turn.cached_tokens == 0
    until_saved(world)
    texts["work/s0"] = world.text("work/s0")
    world.crash()
    assert {name: world.text(name) for name in texts} == texts
    assert world.agent("work/s0").branch.computed


def test_sleepers_open_pages_go_first(world: World) -> None:
    """P25: after a start all are asleep: the one used longest ago is woken to do with less, once."""
    fill(world, ["work/a", "work/b"], lines=12)
    restart_asleep(world)
    upkeep = Upkeep(world.core, lambda: world.now_s, 1.0)
    assert upkeep.next_job(idle=False) is None
    set_quota(world, used(world)["work"] - 1)
    world.settle()
    assert upkeep.next_job(idle=False) == (ref_of("work/a"), "shrink")
    assert upkeep.next_job(idle=False) is None


def test_a_disk_that_refuses_to_shrink_a_log_costs_no_text(world: World) -> None:
    """P8: RAM lets go first; what the log says more is true, and serves after a start."""
    text = fill(world, ["work/a"], lines=12)["work/a"]
    world.refuse_writes()
    assert world.job("shrink", "work/a").facts["durable"]
    assert world.agent("work/a").branch.computed == 0
    assert world.events("log_not_compacted")
    world.heal()
    world.crash()
    assert world.text("work/a") == text
    turn = world.generate("work/a", text).turn
    assert turn.cached_tokens == turn.prompt_tokens - 1


def test_other_branches_stay_saved_without_their_open_pages(world: World) -> None:
    """P25: an agent that did with less is durable in all its branches, and goes on as before."""
    text = fill(world, ["work/a"])["work/a"]
    world.generate("work/a", text[:600] + " but then " + text_of(5))
    world.settle()
    agent = world.agent("work/a")
    assert len(agent.branches) == 2
    assert world.job("shrink", "work/a").facts["durable"]
    assert all(branch.computed % PAGE_TOKENS == 0 for branch in agent.branches.values())
    assert world.generate("work/a", world.text("work/a") + " and").turn.durable
    assert all(branch.durable for branch in agent.branches.values())
    now, branches = world.text("work/a"), set(agent.branches)
    world.crash()
    assert world.text("work/a") == now
    assert set(world.agent("work/a").branches) == branches


@pytest.mark.parametrize("window", [None, PAGE_TOKENS])
def test_a_quota_is_reached_although_nobody_is_saved(make_world: MakeWorld, window: int | None) -> None:
    """P25: unsaved agents are saved as text and ids, their pages go; RAM is not full of what waits."""
    world = make_world(limits=LimitSettings(least_bytes=1), budget_pages=120, window=window)
    texts = fill(world, [f"work/a{number}" for number in range(5)])
    set_quota(world, used(world)["work"] + 1_000)
    for name in texts:
        longer = texts[name] + text_of(40)
        texts[name] = longer + world.generate(name, longer).turn.text
    quota_bytes = used(world)["work"] * 2 // 3
    set_quota(world, quota_bytes)
    until_saved(world)
    assert used(world)["work"] <= quota_bytes
    assert not world.core.pager.quota_held_bytes.get(WORK)
    assert health_facts(world.core)["disk_quotas_too_small"] == []
    world.crash()
    assert {name: world.text(name) for name in texts} == texts


def test_a_small_one_gets_room_beside_a_large_one(world: World) -> None:
    """P25: of those that wait the smallest counts where all of them cannot be met."""
    fill(world, ["work/a", "work/b", "work/c"])
    set_quota(world, used(world)["work"])
    assert not world.generate("work/large", f"large says: {text_of(120)}").turn.durable
    world.generate("work/small", "small says: hello")
    for _ in range(5):
        world.settle()
        world.save_unsaved()
        world.tick()
    assert world.events("kv_given_up")
    assert agent_info(world.core, world.agent("work/small"))["durable"]


def test_a_smaller_quota_takes_at_once_what_is_over(world: World) -> None:
    """P25: nobody has to write for it; the limits say that it converges until files are gone."""
    texts = fill(world, ["work/a", "work/b", "play/p"])
    before = used(world)
    set_quota(world, before["work"] - 1)
    assert world.core.limits.facts()["converging"] == ["namespace_disk_quotas"]
    world.settle()
    assert given_up_of(world) == {"work/a"}
    assert used(world)["work"] < before["work"]
    assert used(world)["play"] == before["play"]
    assert world.core.limits.facts()["converging"] == []
    turn = world.generate("work/a", texts["work/a"]).turn
    assert "are computed again" in turn.match_reason


def test_shared_pages_count_once_for_the_namespace(world: World) -> None:
    """P18: sharing is not punished: a fork costs its log, and what two agents map goes with the one used later."""
    texts = fill(world, ["work/a", "work/b"])
    before = used(world)["work"]
    assert world.job("fork", "work/a", new_agent="z").facts["durable"]
    after = used(world)["work"]
    assert before < after <= before + len(world.fs.live_files()[world.log_path("work/z")])
    figures = statistics(world.core)["namespaces"]
    assert isinstance(figures, dict)
    assert figures["work"]["disk_bytes"] == after
    set_quota(world, after - 1)
    world.settle()
    assert given_up_of(world) == {"work/b"}, "a's pages are z's, too, and z was made last"
    turn = world.generate("work/a", texts["work/a"]).turn
    assert turn.cached_tokens == turn.prompt_tokens - 1


def test_sleepers_of_the_namespace_pay_and_no_others(world: World) -> None:
    """P25: after a start nobody is awake, and each namespace still has its own."""
    texts = fill(world, ["play/p", "work/a", "work/b"])
    restart_asleep(world)
    assert len(world.core.agents.asleep) == 3
    set_quota(world, used(world)["work"] - 1)
    world.settle()
    assert given_up_of(world) == {"work/a"}
    assert used(world)["work"] < world.core.disk_quotas.quotas[WORK]
    world.read_agents = 10
    world.crash()
    assert {name: world.text(name) for name in texts} == texts


def test_use_is_known_after_everything_that_changes_it(world: World) -> None:
    """P6: turns, forks, branches, compactions, deletions, a start with and without reading logs."""
    texts = fill(world, ["work/a", "play/p"])
    world.job("fork", "work/a", new_agent="z", tokens=300)
    world.generate("work/a", texts["work/a"][:200] + " but then " + text_of(30))
    world.settle()
    first = used(world)
    world.job("rollback", "work/z", tokens=100)
    world.job("compact", "work/a")
    world.settle()
    assert used(world) != first
    world.crash(lossy=False)
    kept = used(world)
    restart_asleep(world)
    assert used(world) == kept
    world.read_agents = 10
    world.crash()
    for name in ("work/a", "work/z", "play/p"):
        world.job("delete", name)
    world.settle()
    assert used(world) == {}


def test_an_import_that_does_not_fit_is_refused(world: World) -> None:
    """P22: before anything is written, with both figures and whose quota it is."""
    fill(world, ["work/a"])
    assert export(world, "work/a").error is None
    set_quota(world, used(world)["work"] + 1_000)
    error = bring(world, "work/b").error
    assert isinstance(error, QuotaExceeded)
    assert error.data["namespace"] == "work"
    assert "'work'" in error.message
    assert not world.has("work/b")
    set_quota(world, None)
    assert bring(world, "work/b").error is None
    assert used(world)["work"] > 0
