"""Several clients at once on the real daemon: one batch, one of them cancelled, all of them killed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kvd_client import GenerateStream, errors
from kvd_client.stream import Text
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.prose import prose

pytestmark = pytest.mark.daemon

CLIENTS = 4
LONG = 600


def stream_of(daemon: Daemon, stack: ExitStack, agent: str, text: str) -> GenerateStream:
    """A long generation on a connection of its own."""
    client = stack.enter_context(daemon.new_client())
    return stack.enter_context(client.generate_stream(agent, text, max_tokens=LONG))


def test_clients_share_steps_and_get_what_they_get_alone(daemon: Daemon) -> None:
    """P28, P33: four clients at once hear what each hears alone, and the figures say that they shared steps."""
    texts = [prose(100 + 90 * i, f"share-{i}") for i in range(CLIENTS)]
    expected = [daemon.client.generate(f"alone-{i}", text, max_tokens=60).text for i, text in enumerate(texts)]
    before = daemon.statistics()
    start = threading.Barrier(CLIENTS)

    def call(number: int) -> str:
        with daemon.new_client() as client:
            start.wait(20)
            return client.generate(f"share-{number}", texts[number], max_tokens=60).text

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert list(pool.map(call, range(CLIENTS))) == expected
    after = daemon.statistics()
    assert after["decode_rows"] - before["decode_rows"] == CLIENTS * 59
    assert after["decode_steps"] - before["decode_steps"] < CLIENTS * 59
    assert after["largest_batch"] >= 2
    assert after["reserved_bytes"] == 0


def test_a_cancelled_member_leaves_the_batch(daemon: Daemon) -> None:
    """P34: of three streams in a batch one is cancelled; the others go on to their ends."""
    with ExitStack() as stack:
        streams = [stream_of(daemon, stack, f"member-{i}", prose(50, f"member-{i}")) for i in range(3)]
        events = [iter(stream) for stream in streams]
        for each in events:
            assert any(isinstance(event, Text) for event in each)
        streams[1].cancel()
        with pytest.raises(errors.Cancelled, match="computed tokens are kept"):
            _ = streams[1].result
        assert [streams[i].result.completion_tokens for i in (0, 2)] == [LONG, LONG]


def test_a_kill_in_mid_batch_costs_no_durable_token(make_daemon: MakeDaemon) -> None:
    """P2: every agent of a killed batch resumes at its last durable token and says what a twin says (greedy)."""
    daemon = make_daemon("--sharing", "agent")
    daemon.start()
    texts = [prose(280 + i, f"killed-{i}") for i in range(CLIENTS)]
    said = [daemon.client.generate(f"killed-{i}", text, max_tokens=8).text for i, text in enumerate(texts)]
    computed = [daemon.client.agent_info(f"killed-{i}").computed_tokens for i in range(CLIENTS)]
    with ExitStack() as stack:
        streams = [stream_of(daemon, stack, f"killed-{i}", texts[i] + said[i]) for i in range(CLIENTS)]
        for each in streams:
            assert any(isinstance(event, Text) for event in iter(each))
        daemon.kill()
    daemon.start()
    for number, text in enumerate(texts):
        info = daemon.client.agent_info(f"killed-{number}")
        # a turn that ended before the kill is durable, too
        assert info.computed_tokens >= computed[number]
        assert info.durable
        again = daemon.client.generate(f"killed-{number}", text + said[number], max_tokens=8)
        assert again.cached_tokens >= computed[number] - 1
        daemon.client.generate(f"twin-{number}", text, max_tokens=8)
        assert daemon.client.generate(f"twin-{number}", text + said[number], max_tokens=8).text == again.text


def test_a_call_ends_at_its_timeout_and_keeps_what_it_computed(daemon: Daemon) -> None:
    """`timeout_s` of a call: `cancelled` with the reason; the agent goes on from there. Wrong values are refused."""
    with pytest.raises(errors.Cancelled, match=r"timed out after 0\.3 s"):
        daemon.client.generate("late", prose(20, "late"), max_tokens=2000, timeout_s=0.3, priority="background")
    assert daemon.client.agent_info("late").computed_tokens >= 20
    with pytest.raises(errors.RemoteError, match="timeout_s must be above 0"):
        daemon.client.generate("late", "x", timeout_s=0.0)
    arguments = ("generate", "late-cli", "--text", prose(20, "cli"), "--max-tokens", "2000", "--timeout")
    late = daemon.cli(*arguments, "0.2", "--priority", "background")
    assert (late.code, "timed out after 0.2 s" in late.stderr) == (1, True)
    assert daemon.cli(*arguments, "0").code == 2
    with pytest.raises(errors.RemoteError, match="priority must be interactive or background"):
        daemon.client.generate("late", "x", priority="urgent")  # type: ignore[arg-type]
