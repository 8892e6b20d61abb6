"""Gemma 3 270M, sliding windows and all: details older than a window survive `kill -9` and are used."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest

from tests.support.daemon import MakeDaemon
from tests.support.gemma3 import gemma3_folder
from tests.support.tool_calls import CALLS, parsed, transcript

pytestmark = [pytest.mark.daemon, pytest.mark.real_model, pytest.mark.timeout(300)]

WINDOW = 512
QUESTION = "\n\nThe secret number of the lighthouse is"


def test_a_needle_older_than_two_windows_is_found_after_kill_9(make_daemon: MakeDaemon) -> None:
    """P1, P30, P31, P32: the resumed agent reuses every computed token and says what it read far before its windows."""
    secret = "48213"
    text = f"The secret number of the lighthouse is {secret}.\n\n" + str(topics["assignment"])[:5200]
    daemon = make_daemon("--sharing", "agent", model=gemma3_folder().path).start()
    calls, request = transcript()
    assert daemon.client.inject("tools", calls).durable
    first = daemon.client.inject("keeper", text)
    assert first.durable
    computed = daemon.client.agent_info("keeper").computed_tokens
    assert computed > 2 * WINDOW
    daemon.client.fork("keeper", "twin")
    unbroken = daemon.client.generate("twin", text + QUESTION, max_tokens=8)
    daemon.restart()
    first = (computed - WINDOW) // 256
    for agent in ("keeper", "twin"):
        shown = daemon.client.residency(agent)["agents"][0]["branches"][0]["segments"][0]
        assert shown["window_tokens"] == WINDOW
        assert [page["behind_window"] for page in shown["pages"][:first]] == [True] * first
        assert not any(page["resident"] for page in shown["pages"][:first]), "behind the window, on disk alone"
    answer = daemon.client.generate("keeper", text + QUESTION, max_tokens=8)
    assert (answer.match, answer.cached_tokens) == ("extend", computed)
    assert answer.text == unbroken.text
    assert secret in answer.text
    called = daemon.client.generate("tools", calls + request, max_tokens=60, stop=["\n"])
    assert called.cached_tokens > 0
    assert parsed(called.text) == CALLS[-1], called.text
    again = daemon.client.generate("keeper", text + QUESTION + answer.text + " and", max_tokens=4)
    assert (again.match, again.cached_tokens) == ("extend", daemon.client.agent_info("twin").computed_tokens)
    # cut back to before what the windows see, both go on from what the disk has of them
    half = text[: len(text) // 2]
    back = {agent: daemon.client.generate(agent, half + "; and then", max_tokens=4) for agent in ("keeper", "twin")}
    assert back["keeper"].text == back["twin"].text
    for turn in back.values():
        assert turn.match == "diverge"
        assert WINDOW < turn.cached_tokens < WINDOW + 256, "its window begins in the first page"
        assert "lost" not in turn.match_reason
    assert back["keeper"].server["swapped_in_pages"] == first
