"""Agents that grow to the context limit, and daemons that see many come and go: hits, wear and leftovers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvd.attention.reference import ReferenceBackend
from kvd.model.cache import SequenceCache
from kvd.model.cache_spec import check_supported
from kvd.model.errors import UnsupportedModel
from kvd.model.spec import LayerSpec
from kvd.scheduler.views import statistics
from kvd.store.frame_pool import FramePool
from tests.scheduler.fake_model import CONTEXT_TOKENS
from tests.scheduler.harness import World
from tests.scheduler.test_turn import text_of

LINES_A_TURN = 1
MAX_WRITE_AMPLIFICATION = 3.0
"""Bytes written over bytes of KV: a token's once as a tail, once in its page, and text, ids and frames of turns."""


def test_growth_in_small_turns_to_the_context_limit_is_always_a_hit(
    make_world: Callable[..., World], tally: Counter[str]
) -> None:
    """P20 P16: each turn reuses every computed token to the last one, evicted, restarted or not, up to the limit."""
    world = make_world(budget_pages=48)
    computed = turns = 0
    while computed < CONTEXT_TOKENS - 40:
        text = world.text("a") if turns else ""
        turn = world.generate("a", text + f" turn {turns}" + text_of(LINES_A_TURN), max_tokens=3).turn
        assert turn.cached_tokens == computed, (turns, turn.match_reason)
        assert turn.match == ("extend" if turns else "new")
        assert turn.durable
        computed = world.agent("a").branch.computed
        turns += 1
        if turns % 9 == 0:
            world.settle()
            assert world.job("evict", "a").facts["resident_pages"] == 0
        if turns % 25 == 0:
            world.crash(lossy=turns % 2 == 0)
    tally["long sessions, turns"] += turns
    tally["long sessions, misses"] += 0
    assert turns > 70
    rest = CONTEXT_TOKENS - len(world.agent("a").branch.tokens)
    last = world.generate("a", world.text("a"), max_tokens=rest).turn
    assert last.cached_tokens >= computed
    assert len(world.agent("a").branch.tokens) == CONTEXT_TOKENS
    world.crash()
    assert len(world.agent("a").branch.tokens) == CONTEXT_TOKENS


def test_bytes_written_for_each_new_token_stay_bounded(world: World, tally: Counter[str]) -> None:
    """P26 P15: over a long session of small turns, with all its compactions, each token is written about twice."""
    token_bytes = int(str(statistics(world.core)["token_bytes"]))
    said = turns = 0
    ratios = []
    while world.core.stats.tokens_computed < CONTEXT_TOKENS - 60:
        text = world.text("a") if turns else ""
        turn = world.generate("a", text + f" {turns}" + text_of(LINES_A_TURN), max_tokens=3).turn
        said += turn.written_bytes
        world.settle()
        turns += 1
        figures = statistics(world.core)
        ratios.append(int(str(figures["bytes_written"])) / int(str(figures["tokens_computed"])) / token_bytes)
    assert turns > 70
    assert figures["tokens_computed"] == world.agent("a").branch.computed
    assert 1.0 < ratios[-1] < MAX_WRITE_AMPLIFICATION, ratios[-1]
    assert max(ratios[10:]) < 2 * MAX_WRITE_AMPLIFICATION, "nor does it grow on the way"
    assert said <= int(str(figures["bytes_written"])) < 1.5 * said, "what the turns said is what was written, nearly"
    assert world.swap._store.statistics().pages_written == sum(len(world.page_ids("a", group)) for group in (0, 1))
    tally["wear, bytes written per new token"] += round(ratios[-1] * token_bytes)
    tally["wear, bytes of KV per token"] += token_bytes


def test_agents_that_come_and_go_leave_nothing_behind(make_world: Callable[..., World], tally: Counter[str]) -> None:
    """P23 P25: turns, forks, divergences, evictions and deletions by the dozen; memory, books and disk end empty."""
    world = make_world(budget_pages=40)
    for number in range(24):
        name, fork = f"agent-{number}", f"fork-{number}"
        world.generate(name, f"{number} {text_of(24)}", max_tokens=1)
        world.job("fork", name, new_agent=fork)
        world.generate(fork, world.text(fork) + " on" + text_of(3), max_tokens=1)
        world.generate(name, f"{number} {text_of(5)} else", max_tokens=1)
        world.job("evict", fork)
        for each in (name, fork):
            assert world.job("delete", each).facts["deleted"]
        world.settle()
        tally["agents, made and deleted"] += 2
    core = world.core
    figures = core.pager.statistics()
    assert (figures.resident_bytes, figures.in_flight_bytes, core.memory.pool.resident_bytes) == (0, 0, 0)
    assert (len(core.agents), core.forgotten, core.store._answers, core.store._tails) == (0, {}, {}, {})
    assert not core.memory._pages
    assert not core.memory._spaces
    assert not core.memory._spared
    assert not core.store._deletions
    left = [path for path in world.fs.live_files() if path.suffix in (".log", ".safetensors", ".tmp")]
    assert [path.name for path in left] == ["forks.log"]
    assert world.fs.read(left[0]) == b"", "no note of a fork is left"
    store = world.swap._store.statistics()
    assert (store.swap_bytes, store.log_bytes, store.quarantine_bytes, store.durable_pages) == (0, 0, 0, 0)


def test_memory_of_a_long_session_is_that_of_its_pages(make_world: Callable[..., World]) -> None:
    """P23 P21: a thousand tokens in small turns never hold more than the budget, and after an eviction nothing."""
    world = make_world(budget_pages=24)
    for turns in range(40):
        text = world.text("a") if turns else ""
        world.generate("a", text + f" {turns}" + text_of(2), max_tokens=1)
        figures = world.core.pager.statistics()
        assert world.core.memory.pool.resident_bytes <= figures.budget_bytes
    world.settle()
    world.job("evict", "a")
    assert world.core.memory.pool.resident_bytes == 0
    assert not world.core.memory._loading


def test_models_with_recurrent_state_are_refused_with_the_reason(world: World) -> None:
    """P27: state has no pages, and checkpoints are not there yet: nothing is kept by reference, nothing starts."""
    for model_type in ("mamba", "mamba2", "recurrent_gemma", "jamba", "qwen3_next", "rwkv7"):
        with pytest.raises(UnsupportedModel, match="supported: llama") as refused:
            check_supported({"model_type": model_type, "num_hidden_layers": 2})
        assert model_type in refused.value.message
    layers = (LayerSpec("full", 1, 32, 32), LayerSpec("state", 1, 32, 32))
    spec = replace(world.spec, layers=layers)
    layouts = [group.layout(group.format("q4")) for group in spec.groups]
    with pytest.raises(UnsupportedModel, match="layer 1 has a cache of kind state, which has no KV pages"):
        SequenceCache(pool=FramePool(1 << 20), spec=spec, layouts=layouts, backend=ReferenceBackend())
