"""The page at `/` without a browser: its files, its picture as JSON and as events, and who may see what."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvd.gateway import GatewayConfigError, GatewaySettings, KeyRing, read_key_file
from kvd.gateway.monitor import FIGURES, MAX_EVENTS, MAX_TURNS, SHOWN_EVENTS, Monitor
from kvd.gateway.page import POLICY, static_files
from kvd.gateway.watch import MAX_VIEWERS
from tests.front.service import serving
from tests.gateway.monitored import CODE, HOSTILE, MonitoredDaemon
from tests.gateway.serving import STOP_S, Served, gateway
from tests.support.daemon import eventually, short_folder

KEY, TEAM_KEY = "k" * 24, "t" * 24
SINKS = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " style=", "<style")
"""Doors by which text becomes markup, script or style."""


class Watcher:
    """Reads a stream of pictures as the page does."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.response = response
        self.last_id = ""

    def next(self) -> dict[str, Any]:
        """The next picture; pings are skipped."""
        while (block := self._block()) is not None:
            if "data" in block:
                self.last_id = block["id"]
                assert block["event"] == "picture"
                found: dict[str, Any] = json.loads(block["data"])
                return found
        raise AssertionError("the stream ended")

    def ends(self) -> bool:
        """Whether the stream ends, whatever comes before that."""
        while self._block() is not None:
            pass
        return True

    def ping(self) -> None:
        """Wait for a comment."""
        while (block := self._block()) is not None:
            if not block:
                return
        raise AssertionError("the stream ended")

    def _block(self) -> dict[str, str] | None:
        found = {}
        while line := self.response.readline():
            if line == b"\n":
                return found
            if not line.startswith(b":"):
                name, _, value = line.decode().rstrip("\n").partition(": ")
                found[name] = value
        return None


@contextmanager
def watching(served: Served, **headers: str) -> Iterator[Watcher]:
    """A viewer's stream; `last_event_id=...` is a header."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=STOP_S)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", "/monitor/stream", headers=sent)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        with response:
            yield Watcher(response)
    finally:
        connection.close()


@pytest.fixture
def monitored() -> Iterator[MonitoredDaemon]:
    """A daemon with agents of two namespaces."""
    with short_folder() as folder:
        daemon = MonitoredDaemon(agents=4, pages=10, namespaces=("default", "team"))
        with serving(folder / "kvd.sock", daemon):
            daemon.path = folder / "kvd.sock"  # type: ignore[attr-defined]
            yield daemon


def names(picture: dict[str, Any]) -> set[str]:
    """Agents of a picture."""
    return {agent["agent"] for agent in picture["agents"]}


def keys_of(folder: Path) -> KeyRing:
    """Two keys, of `default` and of `team`."""
    path = folder / "keys"
    path.write_text(f"{KEY} default\n{TEAM_KEY} team\n")
    path.chmod(0o600)
    return read_key_file(path)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_the_page_needs_no_key_and_may_load_nothing_foreign(monitored: MonitoredDaemon, tmp_path: Path) -> None:
    """P37: its files say nothing of anybody; they are ours alone, none has a script or a style inside."""
    with gateway(monitored.path, keys=keys_of(tmp_path)) as served:  # type: ignore[attr-defined]
        page = served.ask("GET", "/")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.headers["content-security-policy"] == POLICY
        assert "default-src 'self'" in POLICY
        assert "unsafe" not in POLICY
        for name, (data, headers) in static_files().items():
            reply = served.ask("GET", f"/static/{name}")
            assert (reply.status, reply.body) == (200, data)
            assert reply.headers["x-content-type-options"] == "nosniff"
            again = served.ask("GET", f"/static/{name}", headers={"if-none-match": headers["etag"]})
            assert (again.status, again.body) == (304, b"")
            text = data.decode().replace("http://www.w3.org/2000/svg", "")
            assert "http:" not in text
            assert "https:" not in text
            for sink in (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                " style=",
                "<style",
            ):
                assert sink not in text, f"{name} has {sink}"
        for path in ("/static/absent.js", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/"):
            assert served.ask("GET", path).status == 404
        assert served.ask("GET", "/", headers={"host": "evil.example"}).status == 403
        for path in ("/monitor", "/monitor/stream"):
            assert served.ask("GET", path).status == 401


def test_an_installed_package_has_the_files() -> None:
    """They are data of the package, so a wheel has them, too."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "gateway/static/*" in project["tool"]["setuptools"]["package-data"]["kvd"]
    assert {"index.html", "page.css", "main.js"} <= set(static_files())


def test_whoever_mends_a_file_can_read_it() -> None:
    """No file of the page is longer than one of Python may be (tools/check_size.py)."""
    assert {name for name, (data, _) in static_files().items() if data.count(b"\n") > 500} == set()


# ---- who sees what --------------------------------------------------------------------------------------------------


def test_a_key_sees_its_namespace(monitored: MonitoredDaemon, tmp_path: Path) -> None:
    """P19: agents, histories and events of other namespaces are in no picture; figures of the whole daemon are."""
    with gateway(monitored.path, keys=keys_of(tmp_path)) as served:  # type: ignore[attr-defined]
        monitored_by = {key: served.ask("GET", "/monitor", headers={"x-api-key": key}).json for key in (KEY, TEAM_KEY)}
        assert names(monitored_by[KEY]) == {"agent-000", "agent-002"}
        assert names(monitored_by[TEAM_KEY]) == {"agent-001", "agent-003"}
        with watching(served, x_api_key=KEY) as mine, watching(served, x_api_key=TEAM_KEY) as theirs:
            first = [mine.next(), theirs.next()]
            mine_told, their_told = (picture["figures"] for picture in first)
            assert mine_told | {"time_s": 0} == their_told | {"time_s": 0}, "the daemon may be asked between the two"
            monitored.do(lambda: monitored.turn("agent-001", 1, "extend", namespace="team"))
            monitored.do(lambda: monitored.say("fault", agent="agent-003", namespace="team", pages=7, bytes=1))
            monitored.do(lambda: monitored.say("reload", outcome="refused", settings=["budget"], reason="of team"))
            monitored.do(lambda: monitored.say("budget", budget_bytes=5, namespace_quotas={"team": 3}))
            seen = [first[0], mine.next()]
            while not any(event["type"] == "budget" for picture in seen for event in picture.get("events", ())):
                seen.append(mine.next())
            told = json.dumps(seen)
            assert "agent-001" not in told
            assert "agent-003" not in told
            assert "team" not in told
            got: list[str] = []
            while "fault" not in got:
                got += [event["type"] for event in theirs.next().get("events", ())]


def test_a_key_that_is_taken_back_ends_its_stream(monitored: MonitoredDaemon, tmp_path: Path) -> None:
    """P37: a stream has no end of its own; whoever looks on with another key goes on looking."""
    ring, path = keys_of(tmp_path), tmp_path / "keys"
    with (
        gateway(monitored.path, keys=ring, key_file=path, ping_s=0.02) as served,  # type: ignore[attr-defined]
        watching(served, x_api_key=KEY) as mine,
        watching(served, x_api_key=TEAM_KEY) as theirs,
    ):
        mine.next()
        theirs.next()
        path.write_text(f"{TEAM_KEY} team\n")
        assert mine.ends()
        assert served.ask("GET", "/monitor", headers={"x-api-key": KEY}).status == 401
        theirs.ping()
        assert served.gateway.watch.viewers == 1


@pytest.mark.parametrize("every_namespace", [False, True])
def test_what_is_told_of_the_whole_daemon_names_nobody(every_namespace: bool) -> None:
    """P19: of figures and of events that are nobody's only what is known to name nobody, whatever daemons tell."""
    monitor = Monitor(show_text=True, every_namespace=every_namespace)
    more = {"namespaces": {"team": {}}, "disk_quotas_full": ["team"], "new": "of team"}
    monitor.answered(answer(full=True) | {"figures": dict.fromkeys(FIGURES, 1) | more})
    for number, kind in enumerate(sorted(SHOWN_EVENTS)):
        monitor.happened({"type": kind, "seq": number, "time_s": 1.5, "pages": 2, "new": "of team"})
    monitor.happened({"type": "reload", "seq": 99, "time_s": 1.5, "outcome": "refused", "reason": "quota of team"})
    monitor.happened({"type": "page_lost", "seq": 100, "time_s": 1.5, "namespace": "default", "reason": "own"})
    told = pictured(monitor, None)
    assert told["figures"] == dict.fromkeys(FIGURES, 1)
    assert {event["type"] for event in told["events"]} == SHOWN_EVENTS
    assert all(event["time_s"] == 1.5 and "seq" in event for event in told["events"])
    assert ("team" in json.dumps(told)) is every_namespace
    assert told["events"][-1]["reason"] == "own", "what is of an agent is its namespace's"


@pytest.mark.parametrize("shown", [False, True])
def test_without_keys_text_is_shown_when_asked_for(monitored: MonitoredDaemon, shown: bool) -> None:
    """P12, P19: where a prompt left the stored text is told to everybody; what stood there only if they may know."""
    divergence = {"byte": 9, "character": 8, "token": 2, "expected": HOSTILE, "found": "other words"}
    with gateway(monitored.path, show_divergence=shown) as served:  # type: ignore[attr-defined]
        served.ask("GET", "/monitor")
        monitored.do(lambda: monitored.turn("agent-000", 1, "diverge", divergence=divergence))

        def turns() -> list[dict[str, Any]]:
            picture = served.ask("GET", "/monitor").json
            return [
                turn for history in picture.get("histories", ()) for turn in history["turns"] if turn.get("outcome")
            ]

        eventually(turns, "the turn is told")
        body = served.ask("GET", "/monitor").body.decode()
        told = turns()[0]
        assert told["miss"] is True
        assert told["divergence"] == (divergence if shown else {"byte": 9, "character": 8, "token": 2})
        assert ("other words" in body) is shown
        assert served.ask("GET", "/monitor").json["daemon"]["text"] is shown


def test_all_namespaces_only_without_keys(monitored: MonitoredDaemon, tmp_path: Path) -> None:
    """P19: `own` is the gateway's namespace; `all` shows every one, but not where keys say who is who."""
    socket = monitored.path  # type: ignore[attr-defined]
    with gateway(socket) as served:
        assert names(served.ask("GET", "/monitor").json) == {"agent-000", "agent-002"}
    with gateway(socket, page="all") as served:
        assert len(names(served.ask("GET", "/monitor").json)) == 4
    with gateway(socket, page="off") as served:
        for path in ("/", "/static/main.js", "/monitor", "/monitor/stream"):
            assert served.ask("GET", path).status == 404
    with pytest.raises(GatewayConfigError, match="without keys"):
        GatewaySettings(socket=tmp_path, page="all", keys=keys_of(tmp_path))
    with pytest.raises(GatewayConfigError, match="own, all, off"):
        GatewaySettings(socket=tmp_path, page="some")


def test_pages_of_other_sites_are_refused(monitored: MonitoredDaemon) -> None:
    """They could read nothing, but would hold viewers' places."""
    with gateway(monitored.path) as served:  # type: ignore[attr-defined]
        for path in ("/monitor", "/monitor/stream"):
            reply = served.ask("GET", path, headers={"sec-fetch-site": "cross-site"})
            assert (reply.status, reply.error["code"]) == (403, "foreign_site")
        assert served.ask("GET", "/monitor", headers={"sec-fetch-site": "same-origin"}).status == 200


# ---- the stream -----------------------------------------------------------------------------------------------------


def test_a_stream_tells_what_changed(monitored: MonitoredDaemon) -> None:
    """First everything, then the agent that changed and the event; who comes back gets only what it missed."""
    with gateway(monitored.path, page="all") as served, watching(served) as viewer:  # type: ignore[attr-defined]
        first = viewer.next()
        assert first["full"] is True
        assert len(first["agents"]) == 4
        assert first["daemon"]["up"] is True
        assert first["daemon"]["states"][CODE["evicted"]] == "evicted"

        def drop() -> None:
            monitored.agents["default", "agent-000"]["cells"][0] = CODE["evicted"]
            monitored.touch(("default", "agent-000"))
            monitored.say("eviction", agent="agent-000", namespace="default", pages=1, bytes=5, reason="asked")

        monitored.do(drop)
        changed: list[dict[str, Any]] = []
        events: list[str] = []
        while not (changed and events):
            picture = viewer.next()
            assert picture["full"] is False
            changed += picture.get("agents", ())
            events += [event["type"] for event in picture.get("events", ())]
        assert [agent["agent"] for agent in changed] == ["agent-000"]
        assert changed[0]["branches"][0]["segments"][0]["runs"][0] == CODE["evicted"]
        assert events == ["eviction"]
        with watching(served, last_event_id=viewer.last_id) as back:
            monitored.do(drop)
            assert back.next()["full"] is False
        with watching(served, last_event_id="of another gateway-1") as stranger:
            assert stranger.next()["full"] is True


def test_a_silent_stream_pings_and_ends_with_the_gateway(monitored: MonitoredDaemon) -> None:
    """P34: a proxy keeps it open, and a stream without an end holds up nobody's."""
    with gateway(monitored.path, ping_s=0.02) as served, watching(served) as viewer:  # type: ignore[attr-defined]
        viewer.next()
        viewer.ping()
        served.loop.call_soon_threadsafe(served.gateway.stop)
        assert viewer.ends()


def test_one_subscription_serves_all_viewers(monitored: MonitoredDaemon) -> None:
    """However many look, the daemon is asked by one; there are only so many places, which are free again."""
    with gateway(monitored.path, ping_s=0.02) as served:  # type: ignore[attr-defined]
        with watching(served) as one, watching(served) as other:
            assert names(one.next()) == names(other.next())
            subscribed = lambda: [method for method, _ in monitored.calls if method == "events.subscribe"]  # noqa: E731
            eventually(subscribed, "the daemon is asked for its events")
            assert b"kvd_gateway_page_viewers 2.0" in served.ask("GET", "/metrics").body
            places = MAX_VIEWERS - 2

            async def take() -> None:
                for _ in range(places):
                    served.gateway.watch.enter()

            async def give() -> None:
                for _ in range(places):
                    served.gateway.watch.leave()

            served.run(take())
            assert served.ask("GET", "/monitor").status == 429
            served.run(give())
            assert served.ask("GET", "/monitor").status == 200
            assert len(subscribed()) == 1
        eventually(lambda: served.gateway.watch.viewers == 0, "both have left")


def test_who_comes_while_the_watch_ends_begins_another(monitored: MonitoredDaemon) -> None:
    """The last viewer left half a minute ago, and the next one comes just then: it is not left with what was."""
    with gateway(monitored.path) as served:  # type: ignore[attr-defined]
        served.ask("GET", "/monitor")
        watch = served.gateway.watch

        async def just_then() -> None:
            watch._stop()
            watch.enter()

        served.run(just_then())
        subscribed = lambda: sum(method == "events.subscribe" for method, _ in monitored.calls)  # noqa: E731
        eventually(lambda: subscribed() == 2, "another watch has begun")


def test_a_daemon_that_loads_its_model_is_waited_for(monitored: MonitoredDaemon) -> None:
    """Its status is told, and nothing is asked of it that it could not answer."""
    monitored.is_loading = True
    with gateway(monitored.path) as served, watching(served) as viewer:  # type: ignore[attr-defined]
        picture = viewer.next()
        while picture.get("daemon", {}).get("status") != "loading":
            picture = viewer.next()
        assert picture["daemon"]["up"] is True
        assert not {"monitor", "events.subscribe", "model.info"} & {method for method, _ in monitored.calls}
        monitored.is_loading = False
        while not picture.get("agents"):
            picture = viewer.next()
        assert served.ask("GET", "/monitor").json["daemon"]["returns"] == 0


def test_a_daemon_that_is_away_is_told(tmp_path: Path) -> None:
    """The page says since when and how to start it; when it is there the picture comes by itself."""
    with short_folder() as folder, gateway(folder / "kvd.sock", ping_s=0.05) as served, watching(served) as viewer:
        first = viewer.next()
        while first.get("daemon", {}).get("up") is None:
            first = viewer.next()
        assert first["daemon"]["up"] is False
        assert "kvd serve" in first["daemon"]["reason"]
        with serving(folder / "kvd.sock", MonitoredDaemon(agents=2)):
            picture = viewer.next()
            while not picture.get("agents"):
                picture = viewer.next()
            assert names(picture) == {"agent-000", "agent-001"}
            facts = served.ask("GET", "/monitor").json["daemon"]
            assert (facts["up"], facts["returns"], facts["model"]) == (True, 1, "tiny")
        picture = viewer.next()
        while picture.get("daemon", {}).get("up") is not False:
            picture = viewer.next()


# ---- versions -------------------------------------------------------------------------------------------------------


def answer(*agents: dict[str, Any], full: bool = False, gone: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    """An answer of the daemon's `monitor`."""
    states, windows = ["clean"], [None]
    told = {"full": full, "agents": agents, "gone": gone, "figures": {}, "states": states, "windows": windows}
    return told | {"page_tokens": 256}


def agent(name: str, **fields: object) -> dict[str, Any]:
    """An agent of such an answer."""
    return {"agent": name, "namespace": "default", "tokens": 1, "last_turn": None, **fields}


def pictured(monitor: Monitor, since: int | None) -> dict[str, Any]:
    """What is newer than a version."""
    found: dict[str, Any] = json.loads(monitor.since(since, "default"))
    return found


def test_a_slow_viewer_gets_the_newest_state_once() -> None:
    """However often an agent changed in between; what is gone is said, and after too much of that all is told anew."""
    monitor = Monitor(show_text=True)
    monitor.answered(answer(agent("a"), agent("b"), full=True))
    seen = monitor.version
    for tokens in range(2, 50):
        monitor.answered(answer(agent("a", tokens=tokens)))
    assert [each["tokens"] for each in pictured(monitor, seen)["agents"]] == [49]
    monitor.answered(answer(gone=(("default", "b"),)))
    assert pictured(monitor, seen)["gone"] == [["default", "b"]]
    assert names(pictured(monitor, None)) == {"a"}
    for number in range(2100):
        monitor.answered(answer(agent(f"short-{number}")))
        monitor.answered(answer(gone=(("default", f"short-{number}"),)))
    late = pictured(monitor, seen)
    assert late["full"] is True
    assert names(late) == {"a"}


def test_events_and_histories_are_bounded() -> None:
    """A viewer that missed events is told so; an agent's history keeps its last turns; both in order."""
    monitor = Monitor(show_text=True)
    monitor.answered(answer(agent("a"), full=True))
    seen = monitor.version
    who = {"agent": "a", "namespace": "default"}
    for number in range(MAX_EVENTS + 10):
        monitor.happened({"type": "fault", "seq": number, "time_s": number, **who})
    late = pictured(monitor, seen)
    assert len(late["events"]) == MAX_EVENTS
    assert late["skipped"] is True
    assert pictured(monitor, monitor.version - 3)["skipped"] is False
    for request in range(MAX_TURNS + 5):
        turn = {"request": request, "time_s": request, **who}
        monitor.happened({"type": "hit", "match": "extend", **turn})
        monitor.happened({"type": "turn_ended", "outcome": "ok", **turn})
    turns = pictured(monitor, None)["histories"][0]["turns"]
    assert len(turns) == MAX_TURNS
    assert all(turn["outcome"] == "ok" and turn["match"] == "extend" for turn in turns)
    monitor.happened({"type": "gap", "reason": "restart", "lost": None})
    monitor.happened({"type": "hit", "request": MAX_TURNS + 4, "match": "exact", "time_s": 99, **who})
    turns = pictured(monitor, None)["histories"][0]["turns"]
    assert [turn["match"] for turn in turns[-2:]] == ["extend", "exact"]  # the number is another run's


def test_the_last_turn_before_the_events_begins_a_history() -> None:
    """What the daemon no longer remembers as an event is in the agent's entry."""
    monitor = Monitor(show_text=False)
    last = {"time_s": 5.0, "match": "diverge", "outcome": "ok", "divergence": {"byte": 1, "expected": "secret"}}
    monitor.answered(answer(agent("a", last_turn=last), full=True))
    assert pictured(monitor, None)["histories"][0]["turns"][0]["divergence"] == {"byte": 1}
    assert b"secret" not in monitor.since(None, "default")


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize(("last", "expected"), [(2, ["0", "1", "2"]), (-1, ["last", "0", "1", "2"])])
def test_a_history_is_the_same_in_whatever_order_it_came(at: int, last: int, expected: list[str]) -> None:
    """The entry may come before, between and after the remembered events, of which its last turn is one or is not."""
    monitor, who = Monitor(show_text=True), {"agent": "a", "namespace": "default"}
    events: list[dict[str, Any]] = []
    for request in range(3):
        turn = {"request": request, **who}
        events.append({"type": "hit", "match": "extend", "match_reason": str(request), "time_s": request, **turn})
        events.append({"type": "turn_ended", "outcome": "ok", "time_s": request + 0.5, **turn})
    entry = agent("a", last_turn={"time_s": last + 0.5, "match": "extend", "match_reason": "last", "outcome": "ok"})
    for number, event in enumerate(events):
        if number == at:
            monitor.answered(answer(entry, full=True))
        monitor.happened(event)
    monitor.answered(answer(entry | {"tokens": 9}, full=True))
    turns = pictured(monitor, None)["histories"][0]["turns"]
    assert [turn["match_reason"] for turn in turns] == expected
