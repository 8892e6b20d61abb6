"""`--swap off`: KV lives in RAM only. What that promises, what eviction costs then, and what happens to the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.errors import InvalidParams
from kvd.ids import Namespace
from kvd.scheduler.limits import LimitChange
from kvd.scheduler.views import agent_info, disk_facts, statistics
from kvd.store.errors import SwapOff
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of


def files_of(world: World) -> dict[Path, bytes]:
    """All that the simulated disk holds."""
    return {path: bytes(data) for path, data in world.fs.live_files().items()}


def test_nothing_is_written_and_every_reply_says_so(make_world: Callable[..., World]) -> None:
    """P26: no page, no log; `durable` is false with the reason, for turns and jobs, and the agent says the same."""
    world = make_world(swap_off=True)
    before = files_of(world)
    outcome = world.generate("a", text_of(30))
    assert not outcome.turn.durable
    assert outcome.turn.durable_reason == "swap is off"
    for operation, more in (("pin", {}), ("unpin", {}), ("rollback", {"tokens": 300}), ("fork", {"new_agent": "b"})):
        facts = world.job(operation, "a", **more).facts
        assert (facts["durable"], facts["durable_reason"]) == (False, "swap is off")
    world.settle()
    assert agent_info(world.core, world.agent("a"))["durable_reason"] == "swap is off"
    assert world.job("delete", "b").facts["deleted"]
    figures = statistics(world.core)
    assert figures["bytes_written"] == figures["fsyncs"] == 0
    assert disk_facts(world.core)["swap"] == "off"
    assert files_of(world) == before


def test_a_disk_quota_is_refused_at_run_time_too(make_world: Callable[..., World]) -> None:
    """P39: it would be shown as in force and do nothing; of the changes that came with it none is made."""
    limits = make_world(swap_off=True).core.limits
    before, name = limits.facts(), Namespace("a")
    quotas = {Namespace("b"): 2_000_000}
    with pytest.raises(InvalidParams, match="namespace_disk_quotas needs --swap on") as caught:
        limits.change(LimitChange(namespace_quotas=quotas, namespace_disk_quotas={name: 2_000_000}))
    assert caught.value.data["parameter"] == "namespace_disk_quotas"
    now = limits.facts()
    assert [now[each] for each in ("namespace_quotas", "namespace_disk_quotas", "until_restart")] == [{}, {}, []]
    assert now["usable_bytes"] == before["usable_bytes"]
    limits.change(LimitChange(namespace_disk_quotas={name: None}))
    assert limits.facts()["until_restart"] == []


def test_what_is_evicted_is_computed_again_and_the_reply_says_so(make_world: Callable[..., World]) -> None:
    """P1 P21: a small budget, more agents than fit: each goes on from its text, and no token is claimed as cached."""
    world = make_world(swap_off=True, budget_pages=16)
    prompts = {name: f"{name} says: {text_of(40)}" for name in "abcde"}
    texts = {name: prompt + world.generate(name, prompt).turn.text for name, prompt in prompts.items()}
    computed_before = world.core.stats.tokens_computed
    again = world.generate("a", texts["a"])
    assert again.turn.text is not None
    assert "page dropped (swap is off)" in again.turn.match_reason
    assert again.turn.cached_tokens < again.turn.prompt_tokens - 1
    recomputed = world.core.stats.tokens_computed - computed_before
    assert recomputed >= again.turn.prompt_tokens - again.turn.cached_tokens
    assert not world.events("page_lost"), "an eviction is no fault of the disk"
    assert int(str(statistics(world.core)["pages_dropped"])) > 0


def test_pages_in_ram_are_used_as_ever(make_world: Callable[..., World]) -> None:
    """P16: while an agent stays in RAM each turn is a hit to the token."""
    world = make_world(swap_off=True)
    text = text_of(20)
    for _ in range(4):
        turn = world.generate("a", text).turn
        text += turn.text + " and then "
    assert turn.cached_tokens > 0
    assert turn.match == "extend"


def test_agents_of_a_folder_are_neither_served_nor_touched(make_world: Callable[..., World]) -> None:
    """P8: what was durable before is there again when swap is on."""
    world = make_world()
    world.generate("a", text_of(30))
    text = world.text("a")
    world.settle()
    world.close()
    world.swap_off = True
    before = files_of(world)
    world.start()
    assert not world.has("a")
    world.generate("a", "another text altogether")
    world.settle()
    world.close()
    assert files_of(world) == before
    world.swap_off = False
    world.start()
    assert world.text("a") == text
    assert world.generate("a", text).turn.cached_tokens > 0


def test_an_import_is_refused_with_the_remedy(make_world: Callable[..., World], tmp_path: Path) -> None:
    """It would be written to disk; an export goes to the user's own file and works."""
    world = make_world(swap_off=True)
    outcome = world.job("import", "a", path=str(tmp_path / "a.safetensors"), replace=False)
    assert isinstance(outcome.error, SwapOff)
    assert "--swap on" in outcome.error.message


@pytest.mark.parametrize("crash", [True, False])
def test_a_restart_begins_with_nothing(make_world: Callable[..., World], crash: bool) -> None:
    """Nothing was promised, nothing is left behind either."""
    world = make_world(swap_off=True)
    world.generate("a", text_of(5))
    if crash:
        world.crash()
    else:
        world.close()
        world.start()
    assert not world.has("a")
