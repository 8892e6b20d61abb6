"""One system prompt, many agents, a real daemon: computed once, stored once, and everybody's after a kill."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvd_client import GenerateResult
from tests.support.daemon import Daemon, MakeDaemon, eventually
from tests.support.prose import prose
from tests.support.tiny_gemma import make_tiny_gemma

pytestmark = pytest.mark.daemon

AGENTS = 16
SYSTEM_TOKENS = 2048
PAGES = SYSTEM_TOKENS // 256
SYSTEM = prose(SYSTEM_TOKENS, "system")
NEW_TOKENS = 4


def text_of(number: int) -> str:
    """The system prompt and what only this agent says."""
    return SYSTEM + prose(20 + number, f"own {number}")


def ask(daemon: Daemon, number: int) -> GenerateResult:
    """A turn over a connection of its own."""
    with daemon.new_client() as client:
        return client.generate(f"agent-{number}", text_of(number), max_tokens=NEW_TOKENS)


def test_sixteen_agents_share_a_system_prompt(make_daemon: MakeDaemon) -> None:
    """P5, P18, P19, P21: computed and stored once, in RAM, too; whole after `kill -9` and the first agent's deletion.

    Another namespace sees nothing of it, `--sharing agent` shares no more, and the last agent frees the disk.
    """
    daemon = make_daemon("--check", "--max-batch", str(AGENTS))
    daemon.start()
    with ThreadPoolExecutor(AGENTS) as pool:
        results = list(pool.map(lambda number: ask(daemon, number), range(AGENTS)))
    assert sorted(result.cached_tokens for result in results) == [0, *[SYSTEM_TOKENS] * (AGENTS - 1)]
    assert {result.match for result in results} == {"new"}
    statistics = daemon.statistics()
    assert statistics["tokens_computed"] <= sum(r.prompt_tokens - r.cached_tokens + NEW_TOKENS for r in results)
    assert statistics["tokens_shared"] == (AGENTS - 1) * SYSTEM_TOKENS
    assert statistics["shared_pages"] == PAGES == len(daemon.page_files())
    assert daemon.client.call("agent.info", {"agent": "agent-3"})["shared_pages"] == PAGES
    page_bytes = daemon.client.model_info()["page_bytes"]
    tail_tokens = sum(info.computed_tokens - SYSTEM_TOKENS for info in daemon.client.agents())
    resident_bytes = PAGES * page_bytes + tail_tokens * page_bytes // 256
    eventually(
        lambda: daemon.statistics()["resident_bytes"] == resident_bytes, "idle tails take the bytes of their tokens"
    )
    assert sum(path.stat().st_size for path in daemon.page_files()) == daemon.statistics()["swap_bytes"]

    daemon.restart()
    recovered = next(line for line in reversed(daemon.log_lines()) if line["event"] == "recovered")
    found = [recovered[name] for name in ("agents", "pages", "orphans", "missing_pages")]
    assert found == [AGENTS, PAGES, 0, 0]
    daemon.client.delete("agent-0")
    for number in (1, AGENTS - 1):
        again = daemon.client.generate(f"agent-{number}", text_of(number) + results[number].text, max_tokens=1)
        assert (again.match, again.cached_tokens) == ("exact", again.prompt_tokens - 1)
    late = daemon.client.generate("late", SYSTEM, max_tokens=1)
    assert late.cached_tokens == SYSTEM_TOKENS - 1
    with daemon.new_client() as other:
        elsewhere = other.generate("agent-1", SYSTEM, max_tokens=1, namespace="other")
    assert (elsewhere.cached_tokens, elsewhere.match_reason) == (0, "no stored text")
    assert len(daemon.page_files()) == 2 * PAGES
    daemon.client.delete("agent-1", namespace="other")

    daemon.kill()
    daemon.options += ["--sharing", "agent"]
    daemon.start()
    assert daemon.client.generate("alone", SYSTEM, max_tokens=1).cached_tokens == 0
    kept = daemon.client.generate("agent-2", text_of(2) + results[2].text, max_tokens=1)
    assert kept.cached_tokens == kept.prompt_tokens - 1
    for info in daemon.client.agents():
        daemon.client.delete(info.agent)
    daemon.restart()
    assert daemon.page_files() == []


def test_a_model_with_windows_shares_too(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """P31: a second agent of a Gemma begins with the pages of the first, and says what an agent alone would say."""
    daemon = make_daemon("--check", model=make_tiny_gemma(tmp_path / "tiny-gemma"))
    daemon.start()
    text = SYSTEM[: len(SYSTEM) // 2]
    first = daemon.client.generate("first", text + prose(300, "one"), max_tokens=NEW_TOKENS)
    second = daemon.client.generate("second", text + prose(30, "two"), max_tokens=NEW_TOKENS)
    alone = daemon.client.generate("alone", text + prose(30, "two"), max_tokens=NEW_TOKENS, namespace="other")
    assert first.cached_tokens == alone.cached_tokens == 0
    assert second.cached_tokens >= 3 * 256
    assert second.text == alone.text
