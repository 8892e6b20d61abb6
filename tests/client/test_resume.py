"""What a stream remembers, and how it goes on: pure, with a clock of its own; then both clients with it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import errors as daemon_errors
from kvd.front import CallContext
from kvd_client import AsyncClient, Client, GenerateStream, async_client, calls, resume
from kvd_client.async_transport import AsyncTransport, connect
from kvd_client.errors import (
    CLOSED_HERE,
    Busy,
    CallTimeout,
    Cancelled,
    ConnectionLost,
    DaemonUnreachable,
    KvdClientError,
    NotReady,
    NotResumable,
    local_error,
)
from kvd_client.resume import FIRST_WAIT_S, LONGEST_WAIT_S, MAX_BREAKS, Told
from kvd_client.stream import Reconnected, Text
from kvd_client.transport import Transport
from kvd_client.wire import ErrorObject, ResponseReceived, StreamReceived
from tests.front.service import FakeService, serving
from tests.front.test_server import on_loop


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Now."""
        return self.now_s


def lost() -> ConnectionLost:
    """The daemon went away."""
    return ConnectionLost("gone", socket="s", command="kvd serve")


def told(clock: Clock | None = None, resume_s: float = 30.0, **options: Any) -> Told[Any]:
    """The memory of a `generate`."""
    call = calls.generate("a", "text", "default", options)  # type: ignore[arg-type]
    return Told(call, resume_s, clock=clock or Clock())


KINDS = ("text", "reasoning", "tool_call", "logprobs")
MATCHED = {"type": "matched", "match": "new", "resume_key": "k", "prompt_tokens": 3}


def answer(words: list[str], kinds: list[str]) -> list[dict[str, Any]]:
    """The events of a whole answer."""
    events: list[dict[str, Any]] = [dict(MATCHED), {"type": "first_token"}]
    for number, (word, kind) in enumerate(zip(words, kinds, strict=True)):
        events.append({"type": "tokens", "ids": [number]})
        if kind == "tool_call":
            events.append({"type": kind, "index": number, "id": str(number), "name": word, "arguments": "{}"})
        elif kind == "logprobs":
            entry = {"id": number, "token": word, "bytes": word.encode(), "logprob": -1.0, "top_logprobs": []}
            events.append({"type": kind, "logprobs": [entry]})
        else:
            events.append({"type": kind, "text": word})
    return [*events, {"type": "usage", "completion_tokens": len(words)}, {"type": "durable", "durable": True}]


def heard(memory: Told[Any], events: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """What a reader gets, text by character."""
    result: list[tuple[str, Any]] = []
    for raw in events:
        event = memory.take(raw)
        if event is None:
            continue
        text = getattr(event, "text", None)
        if isinstance(text, str):
            result += [(event.type, character) for character in text]
        else:
            result.append((event.type, repr(event)))
    return result


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.text("abé", min_size=1, max_size=3), st.sampled_from(["text", "reasoning", "tool_call", "logprobs"])
        ),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.integers(0, 20), max_size=3),
    st.booleans(),
)
def test_every_event_comes_once(said: list[tuple[str, str]], breaks: list[int], joined: bool) -> None:
    """Broken anywhere, any number of times, its text joined otherwise each time: the reader gets what it would have."""
    words, kinds = [word for word, _ in said], [kind for _, kind in said]
    whole = heard(told(), answer(words, kinds))
    memory = told()
    got: list[tuple[str, Any]] = []
    for at in breaks:
        got += heard(memory, answer(words, kinds)[:at])
        memory.sent_again()
    events = answer(words, kinds)
    if joined:
        for first, second in zip(list(events), list(events)[1:], strict=False):
            if first["type"] == second["type"] == "text":
                second["text"] = first["text"] + second["text"]
                events.remove(first)
    got += heard(memory, events)
    by_kind = [[each for each in side if each[0] == kind] for side in (whole, got) for kind in {*kinds, "matched"}]
    half = len(by_kind) // 2
    assert by_kind[:half] == by_kind[half:]
    assert len(got) == len(whole)


def test_the_call_that_goes_on_has_what_was_told() -> None:
    """Key and ids, the time that is left, and a seed where there is something to draw."""
    clock = Clock()
    memory = told(clock, timeout_s=10.0, temperature=0.5)
    first = memory.call()
    assert first.params["resumable"] is True
    assert "resume" not in first.params
    assert isinstance(first.params["seed"], int)
    memory.take(MATCHED)
    memory.take({"type": "tokens", "ids": [5, 6]})
    clock.now_s += 4.0
    memory.broke(lost())
    again = memory.call()
    assert again.params["resume"] == {"key": "k", "tokens": [5, 6]}
    assert again.params["seed"] == first.params["seed"]
    assert again.params["timeout_s"] == pytest.approx(6.0)
    assert "seed" not in told(temperature=0.0).call().params
    assert told(temperature=1.0, seed=3).call().params["seed"] == 3


def test_without_it_a_stream_is_what_it_was() -> None:
    """Opted out, or a call that wants no stream: nothing more is asked for, and a break is raised."""
    for memory in (told(resume_s=0.0), told(stream=False)):
        assert "resumable" not in memory.call().params
        assert memory.take({"type": "text", "text": "x"}) == Text("x")
        with pytest.raises(ConnectionLost):
            memory.broke(lost())


def test_how_long_it_looks_for_the_daemon() -> None:
    """At once, then with growing pauses, for a limited time; what it raises in the end is the break."""
    clock = Clock()
    memory = told(clock, resume_s=5.0)
    memory.take({"type": "tokens", "ids": [1]})
    cause = lost()
    waits = [memory.broke(cause)]

    def look_on() -> None:
        while True:
            clock.now_s += waits[-1]
            waits.append(memory.broke(DaemonUnreachable("nobody", socket="s", command="kvd serve")))

    with pytest.raises(ConnectionLost) as raised:
        look_on()
    assert raised.value is cause
    assert waits[0] == 0.0
    assert waits[1] == FIRST_WAIT_S
    assert max(waits) <= LONGEST_WAIT_S
    assert waits == sorted(waits)
    assert clock.now_s - 100.0 <= 5.0 + LONGEST_WAIT_S


def test_a_call_that_brings_the_daemon_down_is_not_sent_for_ever() -> None:
    """Breaks in a row without a new token are counted; a token in between begins anew."""
    memory = told()
    for _ in range(2):
        memory.take({"type": "tokens", "ids": [1]})
        for _ in range(MAX_BREAKS):
            memory.broke(lost())
            memory.sent_again()
            memory.broke(lost())  # by the process that was dying: nobody has said anything since
            memory.sent_again()
            memory.look(StreamReceived(1, {"type": "queued", "position": 1}), is_wanted=True)
    with pytest.raises(ConnectionLost):
        memory.broke(lost())


def test_what_does_not_heal_is_raised_as_it_is() -> None:
    """A refusal, a timeout, another prompt: these are answers."""
    refusal = local_error("not_resumable", "another prompt")
    assert isinstance(refusal, NotResumable)
    memory = told()
    memory.broke(lost())
    for error in (refusal, CallTimeout("late", timeout_s=1.0), local_error("invalid_params", "no")):
        with pytest.raises(type(error)):
            memory.broke(error)


def test_a_daemon_that_cannot_go_on_yet_is_asked_again() -> None:
    """Loading, draining, a full queue: after a break these are reasons to wait."""
    memory = told()
    memory.broke(lost())
    for name, kind in (("not_ready", NotReady), ("busy", Busy)):
        with pytest.raises(kind) as raised:
            memory.look(ResponseReceived(1, ErrorObject.of(name, "later"), None), is_wanted=True)
        assert memory.is_broken
        memory.broke(raised.value)
    memory.look(ResponseReceived(1, None, {}), is_wanted=True)
    assert not memory.is_broken


def test_that_it_goes_on_is_told_once_the_daemon_does() -> None:
    """Not at each sending: with its first message, and from the break on; a refusal is no going on."""
    clock = Clock()
    memory = told(clock)
    queued = StreamReceived(1, {"type": "queued", "position": 1})
    assert memory.look(queued, is_wanted=True) is None
    memory.take({"type": "tokens", "ids": [5, 6]})
    memory.broke(lost())
    for _ in range(3):
        clock.now_s += 2.0
        memory.sent_again()
        with pytest.raises(Busy):
            memory.look(ResponseReceived(1, ErrorObject.of("busy", "later"), None), is_wanted=True)
    assert memory.look(queued, is_wanted=True) == Reconnected(2, 6.0)
    assert memory.look(queued, is_wanted=True) is None
    memory.broke(lost())
    assert memory.look(ResponseReceived(1, ErrorObject.of("not_resumable", "no"), None), is_wanted=True) is None


class Refusing(FakeService):
    """Says the beginning of an answer and waits; when asked again, has no room a few times, then says it all."""

    async def do_generate(self, params: Mapping[str, Any], context: CallContext) -> object:
        """As the daemon's."""
        number = len(self.calls)
        if 1 < number < 5:
            raise daemon_errors.Busy("the queue is full", retry_after_s=0.0, queued=7)
        context.emit(dict(MATCHED))
        context.emit({"type": "tokens", "ids": [1]})
        context.emit({"type": "text", "text": "Hel"})
        if number == 1:
            return await self.until_cancelled("broken", context, emit=False)
        context.emit({"type": "text", "text": "lo"})
        return {"text": "Hello", "finish_reason": "stop", "agent": "a", "durable": True}


@pytest.fixture
def path(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a server may listen; one that is away is looked for without long pauses."""
    monkeypatch.setattr(resume, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(resume, "LONGEST_WAIT_S", 0.001)
    return short_tmp / "s"


HEARD = ["matched", "text", "reconnected", "text"]


def test_tries_that_are_refused_are_no_events(path: Path) -> None:
    """P2: whoever reads is told of the break once, by the client that blocks."""
    heard: list[str] = []
    with serving(path, Refusing()) as service, Client(path) as client, client.generate_stream("a", "x") as stream:
        for event in stream:
            heard.append(event.type)
            if heard == HEARD[:2]:
                stream._at[0]._socket.shutdown(socket.SHUT_RDWR)
        assert stream.result.text == "Hello"
        assert len(service.calls) == 5
    assert heard == HEARD


@on_loop
async def test_tries_that_are_refused_are_no_events_of_the_async_client(path: Path) -> None:
    """P2: the same, awaited."""
    heard: list[str] = []
    with serving(path, Refusing()):
        async with AsyncClient(path) as client, client.generate_stream("a", "x") as stream:
            async for event in stream:
                heard.append(event.type)
                if heard == HEARD[:2]:
                    assert stream._transport is not None
                    stream._transport._abort()
            assert (await stream.result()).text == "Hello"
    assert heard == HEARD


def test_closing_the_client_ends_a_stream_that_looks_for_its_daemon(path: Path) -> None:
    """P34: from another thread; no connection is made on a client that was closed, but by a later call."""
    client, tries, ended = Client(path, resume_s=60.0), threading.Semaphore(0), list[Exception]()
    make_transport = client._make_transport

    def trying() -> Transport:
        tries.release()
        return make_transport()

    def read(stream: GenerateStream) -> None:
        try:
            list(stream)
        except KvdClientError as error:
            ended.append(error)

    with serving(path) as service:
        stream = client.generate_stream("hangs", "x")
        assert service.has_begun.wait(20)
    client._make_transport = trying  # type: ignore[method-assign]
    reader = threading.Thread(target=read, args=(stream,), daemon=True)
    reader.start()
    assert all(tries.acquire(timeout=20) for _ in range(3))
    client.close()
    reader.join(20)
    assert not reader.is_alive()
    (error,) = ended
    assert isinstance(error, ConnectionLost)
    assert CLOSED_HERE in str(error)
    with serving(path):
        assert client.health().ready
        client.close()


def test_a_stream_that_is_read_on_after_the_client_was_closed(path: Path) -> None:
    """Its daemon went and the client was closed while the reader did something else: it makes no connection either."""
    with serving(path) as service:
        client = Client(path, timeout_s=20)
        stream = client.generate_stream("hangs", "x")
        assert service.has_begun.wait(20)
        stream._at[0]._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ConnectionLost):  # the break is noticed
            client.health()
        client.close()
        with pytest.raises(ConnectionLost):
            list(stream)
        assert client._transport is None
        assert [method for method, _ in service.calls].count("generate") == 1


@on_loop
async def test_closing_the_async_client_ends_its_streams_and_connections(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P34: one that looks for its daemon, and one whose connection is made at that moment, as of any call."""
    client, made = AsyncClient(path, resume_s=60.0), list[AsyncTransport]()
    with serving(path):
        stream = client.generate_stream("hangs", "x")
        events = aiter(stream)
        assert (await anext(events)).type == "first_token"
    tried = asyncio.Event()

    async def connect_and_tell(path: Path, timeout_s: float | None) -> AsyncTransport:
        tried.set()
        return await connect(path, timeout_s)

    async def read_on() -> None:
        async for _ in events:
            pass

    monkeypatch.setattr(async_client, "connect", connect_and_tell)
    reading = asyncio.create_task(read_on())
    await tried.wait()
    await client.close()
    with pytest.raises(ConnectionLost, match=CLOSED_HERE):
        await asyncio.wait_for(reading, 20)

    async def connect_and_close(path: Path, timeout_s: float | None) -> AsyncTransport:
        made.append(await connect(path, timeout_s))
        await client.close()
        return made[-1]

    monkeypatch.setattr(async_client, "connect", connect_and_close)
    with serving(path):
        with pytest.raises(ConnectionLost, match=CLOSED_HERE):
            await client.health()
        assert [each.is_usable for each in made] == [False]
        monkeypatch.undo()
        assert (await client.health()).ready
        await client.close()


def test_a_daemon_that_goes_down_breaks_its_streams() -> None:
    """A call that nobody here cancelled was cancelled by a daemon that stops: the next one goes on with it."""
    cancelled = ResponseReceived(1, ErrorObject.of("cancelled", "the daemon is stopping"), None)
    memory = told()
    with pytest.raises(Cancelled) as raised:
        memory.look(cancelled, is_wanted=True)
    assert memory.broke(raised.value) == 0.0
    for memory, is_wanted in ((told(), False), (told(timeout_s=1.0), True), (told(resume_s=0.0), True)):
        memory.look(cancelled, is_wanted=is_wanted)  # an answer like any other
