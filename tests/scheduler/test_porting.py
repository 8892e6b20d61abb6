"""Export and import of an agent: the same text, the same KV, the same next token; or the one that is there stays."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.errors import AgentExists
from kvd.quant.conditioning import Conditioning
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.core import FormatBook
from kvd.scheduler.file_steps import resumable
from kvd.store.agent_file import read_header
from kvd.vm.errors import SpaceInUse
from tests.scheduler.harness import ROOT, World
from tests.scheduler.porting import (
    FILE,
    MakeWorld,
    bring,
    carry,
    export,
    kv_of,
    swap_files,
    with_agent,
)
from tests.scheduler.test_turn import text_of
from tests.scheduler.test_windows import SLIDING, WINDOW, long_agent


@pytest.mark.parametrize("evicted", [False, True])
def test_an_agent_goes_on_elsewhere_at_its_exact_token(make_world: MakeWorld, evicted: bool) -> None:
    """P1 P14: text, ids and every byte of KV arrive; nothing but the pending token is computed; the next ones agree."""
    here, there = make_world(seed=1), make_world(seed=2)
    text = with_agent(here)
    if evicted:
        here.job("evict", "a")
        here.settle()
    told = export(here).facts
    branch = here.agent("a").branch
    assert (told["tokens"], told["computed_tokens"], told["lost_tokens"]) == (
        len(branch.tokens),
        branch.computed,
        0,
    )
    assert told["file_bytes"] == len(here.fs.live_files()[FILE])
    carry(here, there)
    facts = bring(there).facts
    assert (facts["durable"], facts["computed_again_tokens"]) == (True, 0)
    there.crash()
    other = there.agent("a").branch
    assert (other.tokens, other.token_bytes, other.spans) == (branch.tokens, branch.token_bytes, branch.spans)
    assert (bytes(other.text), other.computed) == (bytes(branch.text), branch.computed)
    seen = there.model.tokens_seen
    first = here.generate("a", text, max_tokens=6).turn
    second = there.generate("a", text, max_tokens=6).turn
    assert (first.text, first.cached_tokens) == (second.text, second.cached_tokens)
    assert there.model.tokens_seen - seen <= 1 + 6
    assert kv_of(here, "a") == kv_of(there, "a")


def test_in_the_same_folder_under_another_name(world: World) -> None:
    """P10: the copy has pages of its own, with the identity of its own agent; the original can go."""
    text = with_agent(world)
    export(world)
    assert bring(world, "b").facts["agent"] == "b"
    assert not set(world.page_ids("a")) & set(world.page_ids("b"))
    computed = world.agent("b").branch.computed
    world.job("delete", "a")
    world.settle()
    world.crash()
    turn = world.generate("b", text + " on", max_tokens=2).turn
    assert turn.cached_tokens == computed
    assert world.events("page_lost") == []


@pytest.mark.parametrize("words", [1, 2])
def test_an_agent_without_a_whole_page(make_world: MakeWorld, words: int) -> None:
    """The tail alone travels."""
    here, there = make_world(), make_world(seed=3)
    text = with_agent(here, words)
    export(here)
    carry(here, there)
    bring(there)
    there.crash()
    again = here.generate("a", text, max_tokens=3).turn.text
    assert there.generate("a", text, max_tokens=3).turn.text == again


def test_windows_travel(make_world: MakeWorld) -> None:
    """P31: pages behind the window come along, so that a rollback finds them; the next token is the same."""
    here, there = make_world(window=WINDOW), make_world(window=WINDOW, seed=5)
    text = long_agent(here)
    export(here)
    carry(here, there)
    bring(there)
    there.crash()
    assert there.generate("a", text, max_tokens=4).turn.text == here.generate("a", text, max_tokens=4).turn.text
    there.job("rollback", "a", tokens=2 * PAGE_TOKENS + 10)
    assert there.agent("a").branch.computed == 2 * PAGE_TOKENS + 10


def test_a_conditioned_format_brings_its_constants(make_world: MakeWorld) -> None:
    """The other daemon never saw the calibration: constants come with the file and stay in its data folder."""
    here, there = make_world(), make_world(seed=7)
    rng = np.random.default_rng(3)
    layouts, operators, ids = {}, {}, []
    for number, group in enumerate(here.spec.groups):
        shape = (1, group.layer.kv_heads, group.layer.k_dim)
        low, high = (rng.random(shape, dtype=np.float32) + offset for offset in (-2, 1))
        constants = Conditioning.from_range(low, high)
        layout = group.layout(group.format("q4c", constants.digest))
        layouts[number, str(layout.format_id)] = layout
        ids.append(layout.format_id)
        for layer, each in zip(layout.layer_indices, constants.layers, strict=True):
            operators[layout.format_id, layer] = each
    for world in (here, there):
        world.check = lambda: None  # type: ignore[method-assign]  # the known bytes are those of plain formats
    here.formats = FormatBook(tuple(ids), layouts, operators)
    here.crash()
    text = with_agent(here)
    export(here)
    carry(here, there)
    bring(there)
    kept = [path for path in there.fs.live_files() if path.parent == ROOT / "conditioning"]
    assert len(kept) == len(here.spec.groups)
    there.settle()
    assert there.generate("a", text, max_tokens=4).turn.text == here.generate("a", text, max_tokens=4).turn.text
    assert kv_of(here, "a") == kv_of(there, "a")


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_a_lost_page_ends_the_kv_not_the_text(make_world: MakeWorld) -> None:
    """P4 P40: the reply says from where on; the importer computes the rest and is durable when it says so."""
    here, there = make_world(), make_world(seed=4)
    text = with_agent(here, 90)
    here.settle()
    here.job("evict", "a")
    here.settle()
    here.spoil_page(here.page_ids("a")[1])
    told = export(here).facts
    assert told["computed_tokens"] == PAGE_TOKENS
    assert told["lost_tokens"] == told["tokens"] - 1 - PAGE_TOKENS > 0
    assert str(PAGE_TOKENS) in told["lost_reason"]
    carry(here, there)
    facts = bring(there).facts
    assert (facts["durable"], facts["computed_again_tokens"]) == (True, told["lost_tokens"])
    there.crash()
    assert there.text("a") == text
    turn = there.generate("a", text, max_tokens=2).turn
    assert turn.cached_tokens >= turn.prompt_tokens - 1
    assert there.truth.is_greedy(there.agent("a").branch.tokens, turn.prompt_tokens)


def test_a_page_lost_behind_the_window_is_left_out(make_world: MakeWorld) -> None:
    """P31: nobody needs it for the next token, so nothing is computed again."""
    here, there = make_world(window=WINDOW), make_world(window=WINDOW, seed=8)
    text = long_agent(here)
    here.job("evict", "a")
    here.settle()
    here.spoil_page(here.page_ids("a", SLIDING)[1])
    told = export(here).facts
    assert told["lost_tokens"] == 0
    assert read_header(here.fs, FILE)[0].absent == {(SLIDING, 1)}
    carry(here, there)
    assert bring(there).facts["computed_again_tokens"] == 0
    assert there.generate("a", text, max_tokens=3).turn.text == here.generate("a", text, max_tokens=3).turn.text
    there.crash()
    assert there.generate("a", there.text("a"), max_tokens=1).turn.durable


def test_a_window_moves_back_with_a_loss() -> None:
    """What was behind the window is seen again where the KV ends earlier."""
    assert resumable(set(), [None, 300], 1000) == 1000
    assert resumable({(1, 0)}, [None, 300], 1000) == 1000
    assert resumable({(0, 2)}, [None, 300], 1000) == 512
    assert resumable({(0, 2), (1, 1)}, [None, 300], 1000) == 256
    assert resumable({(0, 2), (1, 1), (1, 0)}, [None, 300], 1000) == 0


# ---- agents in the way ----------------------------------------------------------------------------------------------


def test_an_agent_is_replaced_only_when_asked(world: World) -> None:
    """P8 P19: the old text goes, pages and all, once the new one is durable."""
    text = with_agent(world)
    export(world)
    world.generate("b", "other " + text_of(40), max_tokens=1)
    old = world.text("b"), world.page_ids("b")
    assert isinstance(bring(world, "b").error, AgentExists)
    assert world.text("b") == old[0]
    world.job("pin", "b")
    assert isinstance(bring(world, "b", replace=True).error, SpaceInUse)
    world.job("unpin", "b")
    assert bring(world, "b", replace=True).facts["durable"]
    assert world.text("b") == text
    world.settle()
    assert not {world.page_path(page) for page in old[1]} & swap_files(world)
    world.crash()
    assert world.text("b") == text
    assert world.generate("b", text + " on", max_tokens=1).turn.durable


def test_replacing_with_a_file_that_lacks_kv(world: World) -> None:
    """The old agent stays until what was lost is computed."""
    text = with_agent(world, 90)
    world.settle()
    world.job("evict", "a")
    world.settle()
    world.spoil_page(world.page_ids("a")[0])
    assert export(world).facts["computed_tokens"] == 0
    world.generate("b", text_of(20) + " other", max_tokens=1)
    other = world.text("b")
    world.refuse_writes(only=".log")
    assert bring(world, "b", replace=True).error is not None
    assert world.text("b") == other
    world.heal()
    assert bring(world, "b", replace=True).facts["durable"]
    world.crash()
    assert world.text("b") == text
