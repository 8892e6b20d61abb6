"""The blocking client against a live server whose service is a fake."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvd_client
from kvd_client import AgentInfo, CallTimeout, Cancelled, Client, ConnectionLost, DaemonUnreachable
from kvd_client.calls import Progress, generate
from kvd_client.errors import (
    AgentNotFound,
    Busy,
    DaemonBug,
    InvalidParams,
    InvalidRequest,
    InvalidText,
    MethodNotFound,
    ProtocolViolation,
    RemoteError,
)
from kvd_client.stream import (
    Durable,
    FirstToken,
    Matched,
    OtherEvent,
    Prefill,
    Queued,
    Text,
    Usage,
)
from kvd_client.wire import Connection, ErrorObject
from tests.client.impostor import Impostor
from tests.front.service import WORDS, FakeService, serving


@pytest.fixture
def path(short_tmp: Path) -> Path:
    """Where the server will listen."""
    return short_tmp / "run" / "s"


@pytest.fixture
def service(path: Path) -> Iterator[FakeService]:
    """A live server."""
    with serving(path) as service:
        yield service


def test_generate_returns_the_documented_fields(path: Path, service: FakeService) -> None:
    """The result has the daemon's figures, the time to the first token by this clock, and what else was sent."""
    with Client(path, namespace="team") as client:
        result = client.generate("a", "hi", max_tokens=9, stop="END", seed=None)
    assert result.text == "".join(WORDS)
    assert (result.finish_reason, result.match, result.durable, result.agent) == ("stop", "extend", True, "a")
    assert (result.prompt_tokens, result.cached_tokens, result.completion_tokens) == (2, 1, 4)
    assert result.ttft_s is not None
    assert 0 < result.ttft_s < 60
    assert result.durable_reason == ""
    assert result.server == {"branch": 3}
    method, params = service.calls[0]
    assert method == "generate"
    assert params == {
        "agent": "a",
        "text": "hi",
        "namespace": "team",
        "max_tokens": 9,
        "stop": ["END"],
    }


def test_the_stream_has_typed_events_and_then_the_result(path: Path, service: FakeService) -> None:
    """Events come typed and in order, unknown ones as they are; `.result` is there afterwards."""
    with Client(path) as client:
        stream = client.generate_stream("a", "hi")
        events = list(stream)
        assert stream.result.text == "".join(WORDS)
    assert events[:4] == [Queued(0), Matched("extend", "", 2, 1), Prefill(1, 1), FirstToken()]
    assert [event.text for event in events if isinstance(event, Text)] == list(WORDS)
    assert events[-3:] == [
        OtherEvent("from_the_future", {"type": "from_the_future", "x": [1]}),
        Usage(2, 1, 4),
        Durable(True, ""),
    ]


def test_without_a_stream_there_is_still_the_time_to_the_first_token(path: Path, service: FakeService) -> None:
    """`stream=False` brings the first-token event only, so the time is measured all the same."""
    with Client(path) as client, client.generate_stream("a", "hi", stream=False) as stream:
        assert list(stream) == [FirstToken()]
        assert stream.result.ttft_s is not None


def test_the_clock_starts_at_sending() -> None:
    """The time to the first token is between sending and the first such event; later ones do not count."""
    now = iter([10.0, 12.5])
    progress = Progress(generate("a", "x", "default", {}), clock=lambda: next(now))
    progress.event({"type": "queued", "position": 1})
    progress.event({"type": "first_token"})
    progress.event({"type": "first_token"})
    assert progress.ttft_s == 2.5


def leave_by_break(client: Client) -> None:
    """Leave the loop while the stream object lives on."""
    stream = client.generate_stream("hangs", "x")
    for _ in stream:
        break
    with pytest.raises(Cancelled):
        _ = stream.result


def leave_by_close(client: Client) -> None:
    """Close without iterating."""
    client.generate_stream("hangs", "x").close()


def leave_by_error(client: Client) -> None:
    """An exception of the loop's body."""
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for _ in client.generate_stream("hangs", "x"):
            _ = 1 // 0


def leave_by_interrupt(client: Client) -> None:
    """Ctrl-C in the loop's body."""
    with pytest.raises(KeyboardInterrupt), client.generate_stream("hangs", "x") as stream:  # noqa: PT012
        for _ in stream:
            raise KeyboardInterrupt


def leave_by_forgetting(client: Client) -> None:
    """Drop the stream without a word."""
    stream = client.generate_stream("hangs", "x")
    del stream


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_close, leave_by_error, leave_by_interrupt, leave_by_forgetting]
)
def test_leaving_early_cancels(path: Path, service: FakeService, leave: Callable[[Client], None]) -> None:
    """P34: however the iteration is left, the daemon is told, and the connection serves the next call."""
    with Client(path) as client:
        leave(client)
        assert service.was_cancelled.wait(20)
        assert client.generate("a", "hi").text == "".join(WORDS)
        assert len({context.peer.connection for context in service.contexts}) == 1


def test_cancel_from_another_thread(path: Path, service: FakeService) -> None:
    """`stream.cancel()` on another thread ends the waiting iteration with Cancelled."""
    with Client(path) as client:
        stream = client.generate_stream("hangs", "")

        def cancel_later() -> None:
            service.has_begun.wait(20)
            stream.cancel()

        thread = threading.Thread(target=cancel_later)
        thread.start()
        with pytest.raises(Cancelled):
            list(stream)
        thread.join()
        stream.cancel()


def test_threads_share_a_client(path: Path, service: FakeService) -> None:
    """Many threads call at a time over one connection and each gets its own answers, whoever reads them."""
    wrong: list[object] = []
    with Client(path) as client:

        def work(number: int) -> None:
            for turn in range(25):
                value = [number, turn]
                if client.call("test.echo", {"value": value, "turns": (number + turn) % 4}) != value:
                    wrong.append(value)
                if client.generate(f"agent{number}", "hi").agent != f"agent{number}":
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len({context.peer.connection for context in service.contexts}) == 1


def test_every_method_sends_its_parameters(path: Path, service: FakeService) -> None:
    """Each method calls its namesake with the documented parameters and types the result."""
    with Client(path, namespace="n") as client:
        assert client.chat("a", [{"role": "user", "content": "hi"}], tools=[{"x": 1}]).prompt_tokens == 2
        assert client.inject("a", "more").appended_tokens == 5
        assert client.inject("a", messages=[{"role": "user", "content": "x"}]).durable
        done, failed = client.inject_into(["a", "missing"], "more", priority="interactive")
        assert (done.agent, done.appended_tokens, done.error) == ("a", 5, None)
        assert (failed.agent, type(failed.error)) == ("missing", AgentNotFound)
        assert client.tokenize("ab") == [97, 98]
        assert [agent.agent for agent in client.agents()] == ["a", "b"]
        info = client.agent_info("a")
        assert isinstance(info, AgentInfo)
        assert (info.namespace, info.tokens, info.server) == ("n", 300, {"created_s": 1.5})
        assert client.fork("a", "c", 7).agent == "c"
        assert client.rollback("a", 3, namespace="other").namespace == "other"
        for method in (client.pin, client.unpin, client.prefetch, client.evict, client.verify):
            assert method("a").agent == "a"
        client.delete("a")
        exported = client.export_agent("a", "a.file", force=True)
        assert (exported.path, exported.lost_tokens, exported.lost_reason) == (os.path.abspath("a.file"), 0, "")
        assert client.import_agent("/tmp/a.file").namespace == "its own"
        assert client.import_agent("/tmp/a.file", agent="b", namespace="other", replace=True).agent == "b"
        assert client.residency()["budget_bytes"] == 1000
        assert client.residency("z")["agents"][0]["agent"] == "z"
        assert client.statistics().tokens_reused == 3
        limits = client.configure(
            budget="4GB", namespace_quotas={"work": 5, "play": None}, namespace_disk_quotas={"work": "1GB"}
        )
        assert (limits.budget_bytes, limits.largest_budget_bytes) == (4_000_000_000, None)
        assert (limits.converging, limits.until_restart) == (("budget",), ("budget",))
        assert (limits.namespace_quotas, limits.server) == ({"work": 5}, {"newer": 1})
        assert client.model_info()["name"] == "tiny"
        assert client.health().ready
        assert client.hello("test")["server"] == "fake"
        assert client.drain() == {"draining": True}
        assert client.shutdown() == {"stopping": True}
    sent = dict(service.calls)
    assert sent["configure"] == {
        "budget": "4GB",
        "namespace_quotas": {"work": 5, "play": None},
        "namespace_disk_quotas": {"work": "1GB"},
    }
    assert sent["inject"] == {
        "agents": ["a", "missing"],
        "text": "more",
        "namespace": "n",
        "priority": "interactive",
    }
    assert sent["chat"]["tools"] == [{"x": 1}]
    assert sent["agent.fork"] == {"agent": "a", "namespace": "n", "new_agent": "c", "tokens": 7}
    assert sent["agent.rollback"] == {"agent": "a", "namespace": "other", "tokens": 3}
    assert sent["agent.export"] == {"agent": "a", "namespace": "n", "path": os.path.abspath("a.file"), "force": True}
    assert sent["agent.import"] == {"path": "/tmp/a.file", "agent": "b", "namespace": "other", "replace": True}
    assert sent["agent.list"] == {}
    assert sent["hello"] == {"client": "test", "protocol": 1}
    assert sent["agent.evict"] == {"agent": "a", "namespace": "n"}


def test_errors_are_exceptions_with_fields(path: Path, service: FakeService) -> None:
    """Each error of the daemon is its class, with name, code, data and retry time; the connection goes on."""
    with Client(path) as client:
        with pytest.raises(AgentNotFound, match="no agent missing") as missing:
            client.agent_info("missing")
        assert missing.value.data == {"agent": "missing"}
        with pytest.raises(Busy) as busy:
            client.generate("busy", "x")
        assert (busy.value.retry_after_s, busy.value.name) == (2.5, "busy")
        with pytest.raises(MethodNotFound):
            client.call("no.such")
        with pytest.raises(DaemonBug) as bug:
            client.call("test.crash")
        assert "secret" not in str(bug.value)
        assert client.health().ready


def test_what_cannot_be_sent_is_refused_here(path: Path, service: FakeService) -> None:
    """Lone surrogates, foreign objects, oversized texts and ambiguous calls never reach the daemon."""
    with Client(path) as client:
        with pytest.raises(InvalidText, match=r"U\+DCFF"):
            client.generate("a", "x\udcff")
        with pytest.raises(InvalidParams):
            client.call("health", {"x": object()})
        with pytest.raises(InvalidRequest, match="16777216"):
            client.generate("a", "x" * (16 << 20))
        with pytest.raises(InvalidParams, match="either"):
            client.inject("a")
        with pytest.raises(InvalidParams, match="list of names"):
            client.inject_into("abc", "x")
        assert client.health().ready
    assert [method for method, _ in service.calls] == ["health"]


def test_large_messages_pass_both_ways(path: Path, service: FakeService) -> None:
    """Megabytes go through the kernel's small buffers in both directions."""
    value = "x" * 6_000_000
    with Client(path) as client:
        assert client.call("test.echo", {"value": value}) == value


def test_nobody_there(short_tmp: Path) -> None:
    """Without a daemon the error names the socket and the command that starts one, and a later call tries again."""
    socket_path = short_tmp / "kvd.sock"
    client = Client(socket_path, timeout_s=5)
    with pytest.raises(DaemonUnreachable, match="kvd serve") as error:
        client.health()
    assert error.value.command == f"kvd serve --data-dir {short_tmp}"
    assert str(socket_path) in str(error.value)
    with serving(socket_path):
        assert client.health().ready
        client.close()


def test_a_restarted_daemon_is_found_again(path: Path) -> None:
    """After a restart between calls the next call connects anew by itself."""
    with Client(path) as client:
        for _ in range(2):
            with serving(path):
                assert client.health().ready
        with pytest.raises(DaemonUnreachable):
            client.health()


def test_a_daemon_that_dies_during_a_call(path: Path) -> None:
    """A call under way when the daemon goes away is ConnectionLost, or the daemon's last word."""
    with Client(path, resume_s=0.0) as client:
        with serving(path) as service:
            stream = client.generate_stream("hangs", "x")
            assert service.has_begun.wait(20)
        with pytest.raises((ConnectionLost, Cancelled)):
            list(stream)


def test_closing_from_another_thread_wakes_the_waiting_one(path: Path, service: FakeService) -> None:
    """`close` ends calls that wait on other threads, and the daemon cancels them."""
    client = Client(path)
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            client.generate("hangs", "")
        except kvd_client.KvdClientError as error:
            outcome.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert all(service.begun.acquire(timeout=20) for _ in threads)
    client.close()
    for thread in threads:
        thread.join(20)
    assert len(outcome) == 3
    assert all(isinstance(error, ConnectionLost) for error in outcome)
    assert service.was_cancelled.wait(20)


def test_a_timeout_cancels(path: Path, service: FakeService) -> None:
    """A call that brings nothing in time raises CallTimeout and is cancelled; the connection goes on."""
    with Client(path, timeout_s=0.05) as client:
        with pytest.raises(CallTimeout):
            client.generate("hangs", "")
        assert service.was_cancelled.wait(20)
        client.timeout_s = None
        assert client.health().ready


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolViolation, "broke the protocol"),
        (b"\x94\x01\x02\xc0\xc0", ProtocolViolation, "not in flight"),
        (b"\x94\x01\x01\xc0\x05", ProtocolViolation, "no map"),
        (b"\x94\x01\x01\xc0\x81\xa5ready\x05", ProtocolViolation, "ready"),
        (b"\x94\x01\x01\xa4oops\xc0", RemoteError, "oops"),
        (Connection().send_fatal(ErrorObject.of("busy", "too many connections")), Busy, "too many"),
    ],
)
def test_a_daemon_that_breaks_the_protocol(short_tmp: Path, answer: bytes, kind: type[RemoteError], words: str) -> None:
    """Nonsense from the other end is a typed error, never a crash or a hang."""
    impostor = Impostor(short_tmp / "s", lambda _: answer)
    with Client(short_tmp / "s", timeout_s=20) as client, pytest.raises(kind, match=words):
        client.health()
    impostor.close()


def test_somebody_elses_socket_is_refused(path: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """P37: a prompt is never sent to a socket that another user made."""
    uid = os.getuid()
    real_stat = os.stat

    def other_owner(target: object, **options: object) -> os.stat_result:
        status = real_stat(target, **options)  # type: ignore[call-overload]
        return os.stat_result((*status[:4], uid + 1, *status[5:])) if str(target) == str(path) else status

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", other_owner)
        with Client(path) as client, pytest.raises(DaemonUnreachable, match="belongs to user"):
            client.health()
