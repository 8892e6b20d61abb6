"""A monitor sees every page of every agent, and the second time only what changed."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from kvd.errors import Cancelled
from kvd.gateway.monitor import FIGURES
from kvd.ids import Namespace
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.monitoring import Monitor
from kvd.scheduler.requests import Resume
from kvd.scheduler.views import health_facts
from kvd.vm.codes import BEHIND_WINDOW, PINNED, SHARED, STATE_BITS, STATES
from kvd_client import MonitorPicture
from kvd_client.monitor import BEHIND_WINDOW as CLIENT_BEHIND
from kvd_client.monitor import PINNED as CLIENT_PINNED
from kvd_client.monitor import SHARED as CLIENT_SHARED
from kvd_client.monitor import STATE_BITS as CLIENT_BITS
from kvd_client.residency import PAGE_MARKS
from tests.scheduler.harness import World, ref_of
from tests.scheduler.test_engine import WAIT_S, Answer, Gate, Runner, make_runner  # noqa: F401
from tests.scheduler.test_turn import text_of


def look(world: World, since: int | None = None, namespace: str | None = None) -> dict[str, Any]:
    """An answer."""
    chosen = None if namespace is None else Namespace(namespace)
    return world.core.monitor.look(world.core, chosen, since).to_wire()


def names(answer: dict[str, Any]) -> set[str]:
    """Agents it tells of."""
    return {each["agent"] for each in answer["agents"]}


def entry(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """One agent of it."""
    return next(each for each in answer["agents"] if each["agent"] == name)


def unpacked(segment: dict[str, Any]) -> list[int]:
    """A code for each page."""
    runs = segment["runs"]
    return [code for code, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def test_both_sides_read_codes_alike() -> None:
    """Flags and the bits of a state are the same; each state has a mark."""
    assert (CLIENT_SHARED, CLIENT_BEHIND, CLIENT_PINNED, CLIENT_BITS) == (SHARED, BEHIND_WINDOW, PINNED, STATE_BITS)
    assert set(STATES) == set(PAGE_MARKS)
    assert len(STATES) <= STATE_BITS + 1


@pytest.mark.parametrize("window", [None, PAGE_TOKENS])
def test_the_map_is_that_of_residency(make_world: Callable[..., World], window: int | None) -> None:
    """P40: state, sharing, window and pin of each page, and the sums, as `residency` and `agent.info` say them."""
    from kvd.scheduler.views import agent_info, residency

    world = make_world(window=window)
    world.generate("a", text_of(80), max_tokens=2)
    world.generate("b", text_of(80) + " b", max_tokens=2)
    world.job("fork", "a", new_agent="c", tokens=PAGE_TOKENS + 20)
    world.settle()
    world.job("pin", "b")
    world.job("evict", "a")
    answer = look(world)
    for name in "abc":
        shown = entry(answer, name)
        (there,) = residency(world.core, ref_of(name))["agents"]  # type: ignore[misc]
        info = agent_info(world.core, world.agent(name))
        assert [each["tokens"] for each in shown["branches"]] == [each["tokens"] for each in there["branches"]]
        for mine, theirs in zip(shown["branches"][0]["segments"], there["branches"][0]["segments"], strict=True):
            pages = [*theirs["pages"], *([theirs["tail"]] if theirs["tail"] else [])]
            codes = unpacked(mine)
            assert [STATES[code & STATE_BITS] for code in codes] == [page["state"] for page in pages]
            assert [bool(code & SHARED) for code in codes] == [page.get("shared_by", 1) > 1 for page in pages]
            assert [bool(code & BEHIND_WINDOW) for code in codes] == [
                page.get("behind_window", False) for page in pages
            ]
            assert [bool(code & PINNED) for code in codes] == [page["pinned"] for page in pages]
            assert mine["first_page"] == sum(bool(code & BEHIND_WINDOW) for code in codes)
        assert (shown["pages"], shown["shared_pages"]) == (info["pages"], info["shared_pages"])
        assert (shown["resident_bytes"], shown["tokens"]) == (info["resident_bytes"], info["tokens"])
        assert (shown["pinned"], shown["computed_tokens"]) == (info["pinned"], info["computed_tokens"])
    assert answer["windows"] == [None, window]
    assert entry(answer, "b")["pinned"]
    assert any(code & PINNED for code in unpacked(entry(answer, "b")["branches"][0]["segments"][0]))


def test_only_what_changed_is_told_again(world: World) -> None:
    """Nothing twice; whatever happens to an agent, its text, its pages, its pin, who shares them, tells it again."""
    for name in "abc":
        world.generate(name, name + text_of(40), max_tokens=2)
    world.settle()
    first = look(world)
    assert (first["full"], names(first)) == (True, {"a", "b", "c"})
    second = look(world, first["version"])
    assert (second["full"], second["agents"], second["gone"]) == (False, [], [])
    changes: list[tuple[Callable[[], object], set[str]]] = [
        (lambda: world.generate("a", world.text("a") + " on", max_tokens=1), {"a"}),
        (lambda: world.job("pin", "b"), {"b"}),
        (lambda: world.job("evict", "c"), {"c"}),
        (lambda: world.job("fork", "c", new_agent="d"), {"c", "d"}),
        (lambda: world.job("rollback", "a", tokens=5), {"a"}),
        (lambda: world.job("unpin", "b"), {"b"}),
    ]
    seen = second["version"]
    for change, told in changes:
        change()
        answer = look(world, seen)
        assert names(answer) == told
        seen = answer["version"]
    world.job("delete", "d")
    last = look(world, seen)
    assert (last["gone"], names(last)) == ([["default", "d"]], {"c"}), "c's pages are its own again"


def test_pages_of_agents_that_did_not_change_are_not_walked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look costs follows the changes, not the pages: a map is made anew only of a space that changed."""
    for name in "abc":
        world.generate(name, name + text_of(40), max_tokens=2)
    world.settle()
    walked: list[object] = []
    codes = world.core.pager.page_codes
    monkeypatch.setattr(world.core.pager, "page_codes", lambda space: walked.append(space) or codes(space))
    look(world)
    assert len(walked) == 3
    look(world)
    assert len(walked) == 3, "a full answer, too, is made of what is known"
    world.job("evict", "b")
    look(world)
    assert walked[3:] == [world.agent("b").branch.space]


def test_what_a_client_put_together_is_what_a_full_answer_says(world: World) -> None:
    """Changes applied one after the other come to the same as everything at once."""
    picture = MonitorPicture()
    for step in range(6):
        world.generate("abc"[step % 3], "abc"[step % 3] + text_of(20 + step), max_tokens=1)
        if step == 4:
            world.job("delete", "a")
        picture.take(look(world, picture.version))
        whole = MonitorPicture()
        whole.take(look(world))
        assert picture.agents == whole.agents
    assert ("default", "a") in picture.gone or ("default", "a") not in picture.agents


def test_versions_that_say_nothing_are_answered_in_full(world: World) -> None:
    """Of another run, of the future, or so old that what is gone since is not remembered."""
    world.generate("a", text_of(5), max_tokens=1)
    version = look(world)["version"]
    for since in (1, version - 10**9, version + 5):
        assert look(world, since)["full"]
    assert Monitor(_base=version + 10).look(world.core, None, version).is_full, "a daemon that was started anew"


def test_a_namespace_sees_its_agents_alone(world: World) -> None:
    """Entries and names of those that went are of the namespace that was asked for."""
    world.generate("a", text_of(5), max_tokens=1)
    assert names(look(world, namespace="default")) == {"a"}
    seen = look(world, namespace="other")
    assert seen["agents"] == []
    world.job("delete", "a")
    assert look(world, seen["version"], "other")["gone"] == []
    assert look(world, seen["version"], "default")["gone"] == [["default", "a"]]


def test_a_figure_is_a_sum_or_known_to_name_namespaces(world: World) -> None:
    """P19: the gateway shows everybody the figures of its list: a new one is put there, or named here."""
    told = {*look(world)["figures"], *health_facts(world.core), "running", "queued", "preempted", "subscribers"}
    assert told - {"namespaces", "disk_quotas_full", "disk_quotas_too_small"} == set(FIGURES)


def test_sleepers_are_shown_from_the_catalog(
    make_runner: Callable[..., Runner],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a start nobody is woken for a look: all pages on disk, the open one in the log; awake, the same agent."""
    first = make_runner()
    first.turn("a", text_of(60), max_tokens=2).wait()
    (before,) = first.look(lambda core: core.monitor.look(core, None, None)).to_wire()["agents"]
    first.stop()
    second = make_runner(read_agents=0)
    answer = second.look(lambda core: core.monitor.look(core, None, None)).to_wire()
    (asleep,) = answer["agents"]
    same = ("agent", "tokens", "computed_tokens", "pages", "pinned", "durable")
    assert [asleep[name] for name in same] == [before[name] for name in same]
    assert (asleep["state"], asleep["resident_pages"], asleep["resident_bytes"]) == ("asleep", 0, 0)
    assert asleep["swapped_pages"] == asleep["pages"]
    assert (answer["figures"]["agents_asleep"], answer["figures"]["agents_untold"]) == (1, 0)
    with monkeypatch.context() as fewer:
        fewer.setattr("kvd.scheduler.monitoring.MAX_ASLEEP", 0)
        assert second.look(lambda core: core.monitor.look(core, None, None)).to_wire()["figures"]["agents_untold"] == 1
    second.turn("a", text_of(60), max_tokens=1).wait()
    (awake,) = second.look(lambda core: core.monitor.look(core, None, answer["version"])).to_wire()["agents"]
    assert awake["state"] == "idle"
    assert awake["resident_pages"] > 0


def test_states_and_tokens_of_a_running_turn(make_runner: Callable[..., Runner]) -> None:  # noqa: F811
    """`running` while it has its place, `queued` behind it; generated tokens grow before the turn ends."""
    engine = make_runner()
    engine.turn("a", text_of(20), max_tokens=2).wait()
    gate = Gate(engine.model)
    tokens: list[int] = []
    running, waiting = engine.turn("a", text_of(20), max_tokens=6), engine.turn("b", text_of(3))
    assert gate.entered.wait(WAIT_S)
    future = engine.engine.call(lambda core: core.monitor.look(core, None, None))
    gate.go_on.set()
    answer = future.result(WAIT_S).to_wire()
    assert {each["agent"]: each["state"] for each in answer["agents"]}["a"] == "running"
    tokens.append(entry(answer, "a")["generated_tokens"])
    running.wait()
    waiting.wait()
    done = engine.look(lambda core: core.monitor.look(core, None, None)).to_wire()
    tokens.append(entry(done, "a")["generated_tokens"])
    assert 2 <= tokens[0] <= tokens[1] == 8
    shown = entry(done, "a")
    assert (shown["turns"], shown["completion_tokens"], shown["state"]) == (2, 8, "idle")
    assert shown["last_turn"]["match"] == "diverge"
    assert shown["last_turn"]["outcome"] == "ok"
    assert 0 < shown["cached_tokens"] <= shown["prompt_tokens"]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_resumed_stream_counts_once_and_is_a_hit(
    make_runner: Callable[..., Runner],  # noqa: F811
    logprobs: int | None,
) -> None:
    """P40: what a stream had before it broke was made once: sums and rates are those of the tokens that were sampled.

    Whether or not the tokens that are there are computed again (for log-probabilities they are), nothing of the prompt
    was missing.
    """
    engine = make_runner()
    first: list[Answer] = []
    is_submitted, ids, key = Event(), list[int](), list[str]()

    def read(event: dict[str, Any]) -> None:
        """The client of a stream whose connection breaks."""
        ids.extend(event.get("ids", ()))
        key.extend([event["resume_key"]] if event["type"] == "matched" else ())
        if len(ids) == 8:
            assert is_submitted.wait(WAIT_S)
            engine.cancel(first[0])

    options: dict[str, Any] = {"max_tokens": 40, "resumable": True, "logprobs": logprobs}
    first.append(engine.turn("a", text_of(20), emit=read, **options))
    is_submitted.set()
    assert isinstance(first[0].error, Cancelled)
    made = entry(engine.look(lambda core: core.monitor.look(core, None, None)).to_wire(), "a")["generated_tokens"]
    assert made >= 8
    looks = []

    def look_on(_event: dict[str, Any]) -> None:
        looks.append(engine.engine.call(lambda core: core.monitor.look(core, None, None)))

    answer = engine.turn("a", text_of(20), emit=look_on, resume=Resume(tuple(ids[:6]), key[0]), **options)
    result = answer.result
    assert (result["match"], result["divergence"], result["resumed_tokens"]) == ("extend", None, 6)
    done = engine.look(lambda core: core.monitor.look(core, None, None)).to_wire()
    shown = [entry(each.result(WAIT_S).to_wire(), "a")["generated_tokens"] for each in looks]
    shown.append(entry(done, "a")["generated_tokens"])
    assert shown == sorted(shown)
    assert shown[0] >= made
    assert shown[-1] == made + result["completion_tokens"] - 6
    assert done["figures"]["completion_tokens"] == shown[-1]
    assert entry(done, "a")["last_turn"]["completion_tokens"] == result["completion_tokens"]
    events = engine.look(lambda core: core.journal.ring.read(0, 1000).events)
    assert [each["type"] for each in events if each["type"] in ("hit", "miss")] == ["miss", "hit"]
