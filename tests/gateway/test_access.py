"""P37: who may use the gateway: keys, hosts, addresses; and what it tells those who may not."""

from __future__ import annotations

import asyncio
import json
import os
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.cli import main
from kvd.gateway import GatewayConfigError, GatewaySettings, KeyFileError, KeyRing, parse_address, read_key_file
from kvd.gateway.auth import LOOK_S, KeyKeeper, check_host
from kvd.gateway.errors import ApiError, CannotListen
from kvd.gateway.serve import listening, run
from kvd.gateway.settings import is_loopback
from tests.gateway.daemons import ScriptedDaemon
from tests.gateway.serving import LineLog, gateway
from tests.support.daemon import eventually

KEY, TEAM_KEY = "k" * 24, "t" * 24
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    """A file of keys."""
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    """Two keys, one of them with a namespace."""
    return read_key_file(key_file(tmp_path, f"# of the tests\n{KEY}\n\n{TEAM_KEY} team\n"))


def test_keys_open_their_namespace(scripted: ScriptedDaemon, keys: KeyRing) -> None:
    """Either header carries a key; each comes to its namespace; health needs none and tells little."""
    own = f"key-{sha256(KEY.encode()).hexdigest()[:16]}"
    with gateway(scripted.path, keys=keys) as served:  # type: ignore[attr-defined]
        for headers in ({}, {"authorization": "Bearer " + "x" * 24}, {"x-api-key": "x"}, {"authorization": KEY}):
            for path in ("/v1/chat/completions", "/metrics", "/v1/models"):
                reply = served.ask("POST" if "chat" in path else "GET", path, CHAT, headers=headers)
                assert reply.status == 401
        assert reply.error["code"] == "missing_api_key"
        assert served.post("/v1/messages", {}).error["type"] == "authentication_error"
        # the refusal arrives although the body was not wanted: no reset while the client still sends
        assert served.ask("POST", "/v1/messages", raw=b" " * 4_000_000).status == 401
        assert scripted.of("chat") == []
        assert served.post("/v1/chat/completions", CHAT, authorization=f"Bearer {KEY}").status == 200
        assert served.post("/v1/chat/completions", CHAT, x_api_key=TEAM_KEY).status == 200
        assert [asked["namespace"] for asked in scripted.of("chat")] == [own, "team"]
        assert served.ask("GET", "/health").json == {"status": "ok"}


@pytest.mark.parametrize(
    ("text", "mode", "named"),
    [
        (KEY, 0o644, "chmod 600"),
        (KEY, 0o660, "chmod 600"),
        ("short", 0o600, "16 characters"),
        (f"{KEY} a b", 0o600, "KEY NAMESPACE"),
        ("schlüssel" * 3, 0o600, "ASCII"),
        (KEY + "\x07", 0o600, "ASCII"),
        (f"{KEY}\n{KEY} team", 0o600, "twice"),
        ("# nothing\n", 0o600, "has no key"),
    ],
)
def test_key_files_that_cannot_be_trusted_are_refused(tmp_path: Path, text: str, mode: int, named: str) -> None:
    """Others could read it, or it is not what was meant."""
    with pytest.raises(KeyFileError, match=named):
        read_key_file(key_file(tmp_path, text, mode))
    with pytest.raises(KeyFileError, match="cannot be read"):
        read_key_file(tmp_path / "absent")


def test_keys_without_a_namespace_share_nothing(tmp_path: Path) -> None:
    """P19: each has one of its own, the same after a restart; only a file that says so puts two keys together."""
    other = "o" * 24
    text = f"{KEY}\n{other}\n{TEAM_KEY} team\n{'u' * 24} team\n"
    ring = read_key_file(key_file(tmp_path, text))
    assert ring.namespace_of(KEY) == read_key_file(key_file(tmp_path, KEY)).namespace_of(KEY)
    assert len({ring.namespace_of(KEY), ring.namespace_of(other), "default"}) == 3
    assert ring.namespace_of("u" * 24) == "team"
    assert ring.namespace_of("v" * 24) is None


def test_keys_follow_their_file(scripted: ScriptedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P37: a key that was taken out is refused from the next look on; a file that is no use changes nothing."""
    monkeypatch.setattr("kvd.gateway.auth.LOOK_S", 0.0)
    path = key_file(tmp_path, f"{KEY}\n")
    with gateway(scripted.path, keys=read_key_file(path), key_file=path) as served:  # type: ignore[attr-defined]

        def statuses() -> tuple[int, int]:
            """Of the two keys."""
            one, two = (served.ask("GET", "/v1/models", headers={"x-api-key": key}).status for key in (KEY, TEAM_KEY))
            return one, two

        def logged() -> list[str]:
            return [event for _, event, _ in served.log.lines if event.startswith("api_keys")]

        assert statuses() == (200, 401)
        assert logged() == []
        key_file(tmp_path, f"{KEY}\n{TEAM_KEY}\n")
        assert statuses() == (200, 200)
        key_file(tmp_path, f"{TEAM_KEY} team\n")
        assert statuses() == (401, 200)
        for spoilt in ("", "short\n"):
            key_file(tmp_path, spoilt)
            assert statuses() == (401, 200)
        path.chmod(0o644)
        assert statuses() == (401, 200)
        path.unlink()
        assert statuses() == (401, 200)
        assert logged() == ["api_keys_changed"] * 2 + ["api_keys_kept"] * 4
        key_file(tmp_path, f"{KEY}\n")
        assert statuses() == (200, 401)


def test_agents_of_keys_that_come_later_have_an_end(
    scripted: ScriptedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P25: those that an earlier run left in a namespace are adopted when its key comes, not at the next start."""
    monkeypatch.setattr("kvd.gateway.auth.LOOK_S", 0.0)
    monkeypatch.setattr("kvd.gateway.app.REAP_EVERY_S", 0.01)
    scripted.listed = [{"namespace": name, "agent": "gw:user:old:1", "idle_s": 1e9} for name in ("team", "other")]
    path = key_file(tmp_path, f"{KEY} default\n")
    try:
        with gateway(scripted.path, keys=read_key_file(path), key_file=path):  # type: ignore[attr-defined]
            eventually(lambda: scripted.of("agent.list"), "those of the first key are looked for")
            key_file(tmp_path, f"{KEY} default\n{TEAM_KEY} team\n")
            eventually(lambda: scripted.of("agent.delete"), "the team's old one is deleted")
            asked = len(scripted.of("agent.list"))
            assert asked == 2, "a list for each change of namespaces, not with every look"
    finally:
        scripted.listed = []
    assert {gone["namespace"] for gone in scripted.of("agent.delete")} == {"team"}


def test_keys_are_looked_at_once_a_second(tmp_path: Path) -> None:
    """Not with every request, by the given clock; a file whose change is undone says nothing."""
    path, log, now = key_file(tmp_path, f"{KEY}\n"), LineLog(), [0.0]
    keeper = KeyKeeper(read_key_file(path), path, log, lambda: now[0])
    assert keeper.ring.namespace_of(KEY)
    path = key_file(tmp_path, f"{TEAM_KEY}\n")
    assert keeper.ring.namespace_of(KEY)
    now[0] = LOOK_S
    assert keeper.ring.namespace_of(KEY) is None
    assert [event for _, event, _ in log.lines] == ["api_keys_changed"]
    assert KeyKeeper(KeyRing(), None, log, lambda: now[0]).ring == KeyRing()


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_key_file_is_not_waited_for(tmp_path: Path) -> None:
    """Opening one waits for whoever writes to it: no request would be served meanwhile. The keys stay as they were."""
    path, log, now = key_file(tmp_path, f"{KEY}\n"), LineLog(), [0.0]
    keeper = KeyKeeper(read_key_file(path), path, log, lambda: now[0])
    path.unlink()
    os.mkfifo(path, 0o600)
    assert keeper.ring.namespace_of(KEY)
    now[0] = LOOK_S
    assert keeper.ring.namespace_of(KEY)
    assert [event for _, event, _ in log.lines] == ["api_keys_kept"]


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_gateway_without_keys_says_whose_it_is(
    tmp_path: Path, keys: KeyRing, monkeypatch: pytest.MonkeyPatch, with_keys: bool
) -> None:
    """P37: the socket is its user's alone, a port is every user's of the machine: the log has it."""
    log, told = LineLog(), []
    monkeypatch.setattr("uvicorn.Server.serve", lambda *_args, **_options: asyncio.sleep(0))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest's own stay
    settings = GatewaySettings(socket=tmp_path / "none", port=0, keys=keys if with_keys else KeyRing())
    run(settings, log, ready=told.append)
    assert len(told) == 1
    assert [event for _, event, _ in log.lines] == ([] if with_keys else ["no_api_keys"])


def test_what_a_prompt_parts_from_is_quoted_only_when_asked_for(scripted: ScriptedDaemon) -> None:
    """P19: whoever knows an agent's name need not have written its text."""
    divergence = {"byte": 3, "character": 3, "token": 1, "expected": "secret", "found": "b"}
    for shown in (False, True):
        with gateway(scripted.path, show_divergence=shown) as served:  # type: ignore[attr-defined]
            scripted.script({"type": "text", "text": "x"}, match="diverge", divergence=divergence)
            headers = served.post("/v1/chat/completions", CHAT, x_kvd_agent="me").headers
            told = json.loads(headers["x-kvd-divergence"])
            assert told == (divergence if shown else {"byte": 3, "character": 3, "token": 1})


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8787", "[::1]:80", "10.1.2.3", "kvd.lan:9"])
def test_known_hosts_pass(host: str) -> None:
    """Addresses and localhost cannot be rebound; other names are those that were allowed."""
    check_host(host, frozenset({"kvd.lan"}))


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8787", "", None, "127.0.0.1.evil.example"])
def test_foreign_hosts_are_refused(host: str | None) -> None:
    """DNS rebinding: a page of another site reaches the port under its own name."""
    with pytest.raises(ApiError, match="--allow-host"):
        check_host(host, frozenset({"kvd.lan"}))


def test_the_host_is_checked_before_anything_else(scripted: ScriptedDaemon, keys: KeyRing) -> None:
    """403 on every path, health too."""
    with gateway(scripted.path, keys=keys) as served:  # type: ignore[attr-defined]
        for path in ("/health", "/v1/models"):
            reply = served.ask("GET", path, headers={"host": "evil.example"})
            assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


def test_only_loopback_needs_no_key(keys: KeyRing, tmp_path: Path) -> None:
    """Other addresses are refused without one."""
    for host in ("0.0.0.0", "192.168.1.2", "::", "some.host"):
        assert not is_loopback(host)
        with pytest.raises(GatewayConfigError, match="--api-key-file"):
            GatewaySettings(socket=tmp_path, host=host)
        GatewaySettings(socket=tmp_path, host=host, keys=keys)
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        GatewaySettings(socket=tmp_path, host=host)


def test_settings_name_what_is_allowed(tmp_path: Path) -> None:
    """Numbers out of range are refused by name."""
    for name, value in (("port", 70000), ("max_body_bytes", 1), ("default_max_tokens", 0), ("ping_s", 0.0)):
        with pytest.raises(GatewayConfigError, match=name.split("_")[0]):
            GatewaySettings(socket=tmp_path, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), (":9", ("127.0.0.1", 9)), ("9", ("127.0.0.1", 9))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    """Host and port, or a port alone."""
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "h:-1", "h:99999", "::1:80", "h:x"])
def test_addresses_that_are_none(text: str) -> None:
    """Refused with the form that is wanted."""
    with pytest.raises(GatewayConfigError, match="HOST:PORT"):
        parse_address(text)


def test_settings_come_from_the_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table `[gateway]`; actions such as `list_rules` are no settings, and a wrong value is named with its place."""
    monkeypatch.delenv("KVD_GATEWAY_ALIAS", raising=False)
    path = tmp_path / "kvd.toml"
    path.write_text('[gateway]\nalias = ["claude-*", "gpt-*"]\nmax-body = "1MiB"\n')
    shown = CliRunner().invoke(main, ["--config", str(path), "config", "show", "--json"])
    found = json.loads(shown.output)["gateway"]
    assert found["alias"] == {"value": ["claude-*", "gpt-*"], "source": f"file {path}"}
    assert found["max_body"]["value"] == 2**20
    assert "list_rules" not in found
    path.write_text("[gateway]\nping = -1\n")
    refused = CliRunner().invoke(main, ["--config", str(path), "gateway", "--list-rules"])
    assert refused.exit_code == 2
    assert "[gateway] ping" in refused.output


def test_a_taken_port_is_told() -> None:
    """With the address and the reason."""
    with listening("127.0.0.1", 0) as sock, pytest.raises(CannotListen, match="cannot listen on"):
        listening("127.0.0.1", sock.getsockname()[1])
