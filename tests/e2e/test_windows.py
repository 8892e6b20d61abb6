"""A model with sliding windows behind the real daemon: several windows long, killed, resumed, cut back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, MakeDaemon, eventually, short_folder
from tests.support.prose import prose
from tests.support.tiny_gemma import WINDOW, make_tiny_gemma
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

LONG = 4 * WINDOW
NEXT = 16


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny Gemma."""
    return make_tiny_gemma(tmp_path_factory.mktemp("gemma") / "tiny-gemma")


@pytest.fixture(scope="module")
def daemon(gemma_dir: Path, zygote: Zygote | None) -> Iterator[Daemon]:
    """A daemon that serves it, with `--check` on."""
    with short_folder() as folder, Daemon(folder, gemma_dir, ("--check",), zygote=zygote) as running:
        yield running


def test_five_turns_of_which_each_is_a_hit(daemon: Daemon) -> None:
    """P16, P31: past several windows every turn reuses all computed tokens; the second BOS never comes."""
    text = prose(LONG, "gemma")
    result = daemon.client.generate("five", text, max_tokens=NEXT)
    assert result.prompt_tokens > LONG
    for turn in range(5):
        had = daemon.client.agent_info("five").computed_tokens
        text += result.text + prose(30, turn)
        result = daemon.client.generate("five", text, max_tokens=NEXT)
        assert (result.match, result.cached_tokens) == ("extend", had)
        assert result.durable


def test_a_kill_changes_no_token(make_daemon: MakeDaemon, gemma_dir: Path) -> None:
    """P2, P31: the resumed agent says what a twin says that never was killed, and reuses every computed token."""
    daemon = make_daemon("--sharing", "agent", model=gemma_dir)
    daemon.start()
    text = prose(LONG + 100, "kill")
    answers = {agent: daemon.client.generate(agent, text, max_tokens=NEXT) for agent in ("killed", "twin")}
    assert answers["killed"].text == answers["twin"].text
    text += answers["twin"].text + prose(20, "next")
    unbroken = daemon.client.generate("twin", text, max_tokens=NEXT)
    computed = daemon.client.agent_info("killed").computed_tokens
    daemon.restart()
    resumed = daemon.client.generate("killed", text, max_tokens=NEXT)
    assert resumed.text == unbroken.text
    assert resumed.cached_tokens == unbroken.cached_tokens == computed


def test_a_rollback_by_more_than_a_window_is_a_hit(daemon: Daemon) -> None:
    """What sliding layers saw before the window is still there: cut back far, the agent goes on without computing."""
    text = prose(LONG, "back")
    short = prose(LONG - 2 * WINDOW, "back")
    daemon.client.generate("whole", text, max_tokens=1)
    daemon.client.rollback("whole", LONG - 2 * WINDOW + 1)  # BOS is a token, too
    daemon.client.inject("fresh", short)
    resumed = daemon.client.generate("whole", short + prose(9, "new"), max_tokens=NEXT)
    fresh = daemon.client.generate("fresh", short + prose(9, "new"), max_tokens=NEXT)
    assert (resumed.match, resumed.cached_tokens) == ("extend", fresh.cached_tokens)
    assert fresh.cached_tokens == LONG - 2 * WINDOW + 1
    assert resumed.text == fresh.text


def test_ram_holds_the_window_and_the_map_says_so(daemon: Daemon) -> None:
    """P31: of a prompt four windows long the sliding group keeps the pages of one; the rest is shown apart."""
    daemon.client.inject("seen", prose(LONG, "seen"))
    tokens = daemon.client.agent_info("seen").computed_tokens
    (agent,) = daemon.client.residency("seen")["agents"]
    sliding, full = agent["branches"][0]["segments"]
    assert (sliding["window_tokens"], full["window_tokens"]) == (WINDOW, None)
    first = (tokens - WINDOW) // 256
    assert first == 3
    assert [page["behind_window"] for page in sliding["pages"]] == [n < first for n in range(tokens // 256)]
    assert [page["resident"] for page in sliding["pages"]] == [n >= first for n in range(tokens // 256)]
    assert all(page["resident"] and not page["behind_window"] for page in full["pages"])
    info = daemon.client.agent_info("seen")
    assert info.behind_window_pages == first
    tail_tokens = tokens % 256
    unused_bytes = (256 - tail_tokens) * daemon.client.model_info()["page_bytes"] // 256
    assert info.swapped_pages == 0
    # its open pages are packed once nobody has used it for a while
    assert info.server["needed_bytes"] - info.resident_bytes in (0, unused_bytes)
    drops = daemon.client.statistics().server["window_drops"]
    assert drops >= first
    daemon.client.rollback("seen", tokens - 2 * WINDOW)
    assert daemon.client.prefetch("seen").behind_window_pages == (tokens - 3 * WINDOW) // 256 == 1
    eventually(lambda: daemon.client.agent_info("seen").swapped_pages == 0, "the hinted pages are resident")


def test_both_kinds_of_layers_are_shown(daemon: Daemon) -> None:
    """`model.info` names both groups with the window, so that a user sees what is cached."""
    groups = daemon.client.model_info()["groups"]
    assert [(group["kind"], group["layers"], group["window"]) for group in groups] == [
        ("sliding", 4, WINDOW),
        ("full", 2, None),
    ]
