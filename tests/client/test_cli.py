"""The commands, through click's runner and, for signals, a real process."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kvd_client.cli import cli
from kvd_client.cli_wait import Waiting
from kvd_client.stream import FirstToken, Prefill, Queued
from tests.front.service import WORDS, FakeService, serving

TEXT_COMMANDS = ["chat", "generate", "inject", "tokenize"]
AGENT_COMMANDS = [
    "agents",
    "evict",
    "export",
    "fork",
    "import",
    "pin",
    "prefetch",
    "residency",
    "rm",
    "rollback",
    "show",
    "unpin",
    "verify",
]
DAEMON_COMMANDS = ["budget", "drain", "events", "health", "model", "shutdown", "stats", "top"]
COMMANDS = sorted(TEXT_COMMANDS + AGENT_COMMANDS + DAEMON_COMMANDS)
END_FIELDS = [
    "text",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "match",
    "match_reason",
    "ttft_s",
    "durable",
    "agent",
    "context_full",
]


@pytest.fixture
def service(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    """A live server at the socket of KVD_DATA_DIR."""
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    monkeypatch.setenv("KVD_DATA_DIR", str(short_tmp))
    with serving(short_tmp / "kvd.sock") as service:
        yield service


def run(*args: str, stdin: bytes | None = None, code: int = 0) -> Result:
    """Run a command and check its exit code."""
    result = CliRunner().invoke(cli, list(args), input=stdin)
    assert result.exit_code == code, result.output
    return result


def printed(result: Result) -> Any:
    """The one JSON value on stdout."""
    return json.loads(result.stdout)


def test_generate_ends_with_one_object(service: FakeService) -> None:
    """`generate --json` prints exactly the documented object and nothing else on stdout."""
    result = run("generate", "alice", "--text", "hi", "--max-tokens", "7", "--temperature", "0.5", "--json")
    end = printed(result)
    assert list(end) == END_FIELDS
    assert (end["text"], end["agent"], end["durable"], end["match"]) == ("".join(WORDS), "alice", True, "extend")
    assert 0 < end["ttft_s"] < 60
    assert result.stderr == ""
    assert "wörld" in result.stdout
    assert service.calls[0][1]["max_tokens"] == 7
    assert service.calls[0][1]["temperature"] == 0.5


def test_generate_streams_text_and_sums_up_on_stderr(service: FakeService) -> None:
    """Without --json stdout is the text alone, byte for byte; the summary is a line of its own on stderr.

    That holds where both end up in one place, too.
    """
    for extra in ([], ["--no-stream"]):
        result = run("generate", "alice", "--text", "hi", *extra)
        assert result.stdout_bytes == "".join(WORDS).encode()
        assert result.stderr.startswith("\n[alice: ")
        assert result.stderr.count("\n") == 2
        assert "!\n[alice: " in result.output
        assert "4 tokens, stop" in result.stderr
        assert "1 reused" in result.stderr
    assert [params["stream"] for _, params in service.calls] == [True, False]


def test_the_text_has_one_source_with_its_bytes_unchanged(service: FakeService, tmp_path: Path) -> None:
    """--text, --file and stdin give the same bytes, line ends and byte-order mark included."""
    text = "\ufeffa\r\nb\n\n\u2028c "
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    run("generate", "a", "--text", text, "--json")
    run("generate", "a", "--file", str(file), "--json")
    run("generate", "a", "-", "--json", stdin=text.encode())
    run("inject", "a", "-", "--json", stdin=text.encode())
    assert [params["text"] for _, params in service.calls] == [text] * 4


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "a"], "exactly once"),
        (["generate", "a", "-", "--text", "x"], "exactly once"),
        (["generate", "a", "--text", "x", "--file", __file__], "exactly once"),
        (["generate", "a", "prompt.txt"], "unexpected argument 'prompt.txt'"),
        (["generate"], "AGENT"),
        (["generate", "a", "--file", "/no/such/file"], "does not exist"),
        (["generate", "a", "--text", "x", "--max-tokens", "-1"], "max-tokens"),
        (["generate", "a", "--text", "x\udcff"], "not UTF-8: byte 0xff at offset 1"),
        (["chat", "a"], "--message"),
        (["chat", "a", "--messages-file", __file__], "not JSON"),
        (["rollback", "a", "many"], "many"),
        (["export", "a"], "Missing argument 'FILE'"),
        (["save", "a"], "No such command"),
    ],
)
def test_wrong_usage_exits_with_2(service: FakeService, args: list[str], words: str) -> None:
    """Usage errors say what is allowed, exit with 2, and never reach the daemon."""
    assert words in run(*args, code=2).stderr
    assert service.calls == []


def test_stdin_must_be_utf8(service: FakeService) -> None:
    """Bytes that are not UTF-8 are named with their offset."""
    assert "stdin is not UTF-8: byte 0xff at offset 2" in run("generate", "a", "-", stdin=b"ab\xff", code=2).stderr
    assert service.calls == []


def test_chat_sends_the_whole_conversation(service: FakeService, tmp_path: Path) -> None:
    """System message, the file's messages, then each --message as a user message; the end object is generate's."""
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    file = tmp_path / "history.json"
    file.write_text(json.dumps(history))
    args = ["--system", "Be brief.", "--messages-file", str(file), "--message", "one", "--message", "two"]
    end = printed(run("chat", "alice", *args, "--stop", "A", "--stop", "B", "--json"))
    assert list(end) == END_FIELDS
    sent = service.calls[0][1]
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        *history,
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
    ]
    assert sent["stop"] == ["A", "B"]
    file.write_text('{"role": "user"}')
    assert "list of messages" in run("chat", "alice", "--messages-file", str(file), code=2).stderr


def test_chat_with_tools(service: FakeService, tmp_path: Path) -> None:
    """Files of JSON go as they are; a name is a function that must be called; calls and reasoning are shown."""
    tools, form = tmp_path / "tools.json", tmp_path / "form.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "f"}}]))
    form.write_text('{"type": "json_object"}')
    asked = ["chat", "calls", "--message", "x", "--tools", str(tools)]
    options = ["--tool-choice", "f", "--one-tool-call", "--template-option", "a=false", "--template-option", "b=c"]
    end = printed(run(*asked, *options, "--response-format", str(form), "--json"))
    assert list(end) == [*END_FIELDS, "message"]
    assert end["message"]["tool_calls"][0]["function"]["name"] == "f"
    sent = service.calls[0][1]
    assert sent["tools"] == json.loads(tools.read_text())
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert sent["parallel_tool_calls"] is False
    assert sent["chat_template_kwargs"] == {"a": False, "b": "c"}
    assert sent["response_format"] == {"type": "json_object"}
    for more in ([], ["--no-stream"]):
        shown = run(*asked, "--tool-choice", "none", *more)
        assert shown.stdout == 'Wait.\nf({"x": 1})\n'
        assert ("hm" in shown.stderr) is not bool(more)
    assert service.calls[-1][1]["tool_choice"] == "none"
    tools.write_text("{}")
    assert "must hold a list of functions" in run(*asked, code=2).stderr
    tools.write_text("[")
    assert "is not JSON" in run(*asked, code=2).stderr
    assert "NAME=VALUE" in run("chat", "a", "--message", "x", "--template-option", "a", code=2).stderr


def test_facts_as_json_and_for_people(service: FakeService) -> None:
    """Every command that prints facts prints them as JSON with --json, and readably without."""
    assert [row["agent"] for row in printed(run("agents", "--json"))] == ["a", "b"]
    assert printed(run("show", "a", "--json"))["created_s"] == 1.5
    assert re.search(r"^resident bytes +4096 B$", run("show", "a").stdout, re.MULTILINE)
    assert printed(run("fork", "a", "b", "--tokens", "5", "--json"))["agent"] == "b"
    assert printed(run("rollback", "a", "5", "--json"))["tokens"] == 300
    for command in ("pin", "unpin", "prefetch", "evict"):
        assert printed(run(command, "a", "--json"))["agent"] == "a"
    assert printed(run("export", "a", "/tmp/f", "--json"))["path"] == "/tmp/f"
    assert printed(run("import", "/tmp/f", "--as", "b", "--json"))["agent"] == "b"
    assert printed(run("rm", "a", "--json")) == {"agent": "a", "deleted": True}
    assert printed(run("residency", "--json"))["agents"][0]["agent"] == "a"
    assert printed(run("top", "--namespace", "n", "--json"))["figures"] == {"asked": {"namespace": "n"}}
    assert printed(run("inject", "a", "--text", "x", "--json"))["appended_tokens"] == 5
    assert printed(run("tokenize", "--text", "ab", "--json")) == {"tokens": [97, 98]}
    assert run("tokenize", "--text", "ab").stdout == "97 98\n"
    assert printed(run("model", "--json"))["name"] == "tiny"
    assert printed(run("drain", "--json")) == {"draining": True}
    assert printed(run("shutdown", "--json")) == {"stopping": True}
    stats = printed(run("stats", "--json"))
    assert {"budget_bytes", "resident_bytes", "peak_resident_bytes", "swap_bytes", "tokens_computed"} <= set(stats)


def test_what_was_done_is_one_line(service: FakeService) -> None:
    """Commands that change an agent say so in one line, with what the agent takes now."""
    state = "300 tokens, 4096 B in RAM, 1 page only on disk\n"
    for command, word in (("pin", "pinned"), ("unpin", "unpinned"), ("prefetch", "prefetched"), ("evict", "evicted")):
        assert run(command, "a").stdout == f"a {word}: {state}"
    assert run("fork", "a", "b").stdout == f"b forked from a: {state}"
    assert run("rollback", "a", "300").stdout == f"a cut: {state}"
    assert run("export", "a", "/tmp/f").stdout == "a exported to /tmp/f: 300 tokens, 4096 B\n"
    assert run("export", "worn", "/tmp/f").stdout.endswith("KV is lost\n")
    assert run("import", "/tmp/f", "--as", "b").stdout == f"b imported: {state}"
    assert run("rm", "a").stdout == "a deleted\n"
    assert run("inject", "a", "--text", "x").stdout == "a: 5 tokens appended, 12 in all; durable\n"


def test_the_table_of_agents(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heading and a line each; the namespace when it was asked for; words when there is no agent."""
    lines = run("agents").stdout.splitlines()
    assert lines[0].split() == ["agent", "tokens", "in", "RAM", "on", "disk", "pinned", "durable", "format"]
    assert lines[1].split() == ["a", "300", "4096", "B", "1", "page", "no", "yes", "q4"]
    assert "namespace" in run("agents", "--namespace", "default").stdout

    async def nobody(params: object, context: object) -> object:
        return {"agents": []}

    monkeypatch.setattr(service, "do_agent_list", nobody)
    assert run("agents").stdout == "no agents yet\n"
    assert printed(run("agents", "--json")) == []


def test_residency_ends_with_the_budget(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages as marks, and what they take of the budget."""

    async def answer(params: object, context: object) -> object:
        segment = {"group": 0, "pages": [{"state": "evicted", "shared_by": 1}], "tail": None}
        branch = {"branch": 1, "current": True, "tokens": 256, "segments": [segment]}
        agents = [{"agent": "a", "namespace": "default", "pinned": False, "branches": [branch]}]
        return {"page_tokens": 256, "budget_bytes": 10**10, "resident_bytes": 2_400_000, "agents": agents}

    monkeypatch.setattr(service, "do_residency", answer)
    lines = run("residency").stdout.splitlines()
    assert "a  256 tokens  ░" in lines
    assert lines[-1] == "2.4 MB in RAM, of a budget of 10.0 GB"


def test_inject_takes_messages(service: FakeService, tmp_path: Path) -> None:
    """--message and --messages-file send messages, as `chat` does; a text besides is refused."""
    run("inject", "a", "--message", "one", "--message", "two", "--json")
    two = [{"role": "user", "content": one} for one in ("one", "two")]
    assert service.calls[0][1]["messages"] == two
    assert "not both" in run("inject", "a", "--message", "one", "--text", "x", code=2).stderr
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([{"role": "system", "content": "be brief"}]))
    run("inject", "a", "--messages-file", str(file), "--message", "one", "--priority", "interactive")
    assert service.calls[-1][1]["messages"] == [{"role": "system", "content": "be brief"}, two[0]]
    assert service.calls[-1][1]["priority"] == "interactive"
    assert "not both" in run("inject", "a", "-", "--messages-file", str(file), code=2).stderr


def test_inject_into_several_agents(service: FakeService) -> None:
    """A line or an entry for each agent; the exit code is 1 when one of them failed, and the others are told of."""
    assert [row["agent"] for row in printed(run("inject", "a", "b", "--text", "x", "--json"))] == ["a", "b"]
    assert service.calls[-1][1]["agents"] == ["a", "b"]
    failed = run("inject", "a", "missing", "-", stdin=b"x", code=1)
    assert failed.stdout.splitlines() == [
        "a: 5 tokens appended, 12 in all; durable",
        "missing: FAILED: no agent missing",
    ]
    entry = printed(run("inject", "a", "missing", "--text", "x", "--json", code=1))[1]
    assert (entry["agent"], entry["error"]["name"]) == ("missing", "agent_not_found")
    assert "name the agents" in run("inject", "-", stdin=b"x", code=2).stderr


def test_a_path_that_is_no_socket_is_said_to_be_none(tmp_path: Path) -> None:
    """Nobody is told to start a daemon over a file that is there."""
    file = tmp_path / "notes.txt"
    file.write_text("x")
    result = run("health", "--socket", str(file), code=3)
    assert f"{file} is not a socket" in result.stderr
    assert "kvd serve" not in result.stderr


def test_health_is_an_exit_code(service: FakeService) -> None:
    """0 only when the daemon can generate; 1 while it is starting, with the reason."""
    assert printed(run("health", "--json"))["ready"] is True
    service.ready = False
    result = run("health", code=1)
    assert "loading the model" in result.stdout


def test_failures_exit_with_1_and_one_line(service: FakeService) -> None:
    """An error of the daemon is one line on stderr: its message and when to try again; stdout is empty.

    With --json its name and facts are there, too.
    """
    result = run("generate", "busy", "--text", "x", "--json", code=1)
    assert result.stdout == ""
    assert result.stderr == "kvd-client: busy: the queue is full (queued=7); try again in 2.5 s\n"
    assert run("generate", "busy", "--text", "x", code=1).stderr == (
        "kvd-client: the queue is full; try again in 2.5 s\n"
    )
    assert run("show", "missing", code=1).stderr == "kvd-client: no agent missing\n"
    assert "agent_not_found" in run("show", "missing", "--json", code=1).stderr
    assert "agent_not_found" in run("--json", "show", "missing", code=1).stderr


def test_no_daemon_exits_with_3_and_the_command(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a daemon the exit code is 3 and the message has the command that starts the right one."""
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    monkeypatch.delenv("KVD_DATA_DIR", raising=False)
    result = run("generate", "a", "--text", "x", "--data-dir", str(short_tmp), code=3)
    assert f"kvd serve --data-dir {short_tmp}" in result.stderr
    monkeypatch.setenv("KVD_DATA_DIR", str(short_tmp))
    assert run("health", code=3).stderr.rstrip().endswith("start it with: kvd serve")


def test_where_the_daemon_is(service: FakeService, short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--socket and --data-dir stand before or after the command; what is nearer wins, and both win over variables."""
    monkeypatch.setenv("KVD_DATA_DIR", "/nowhere")
    monkeypatch.setenv("KVD_SOCKET", "/nowhere/s")
    run("health", code=3)
    run("health", "--data-dir", str(short_tmp))
    run("--socket", str(short_tmp / "kvd.sock"), "health")
    run("--socket", "/nowhere/x", "health", "--data-dir", str(short_tmp))
    monkeypatch.setenv("KVD_SOCKET", str(short_tmp / "kvd.sock"))
    run("health")
    assert printed(run("--json", "--namespace", "x", "show", "a"))["namespace"] == "x"
    assert printed(run("show", "a", "--json", "--namespace", "y"))["namespace"] == "y"


def test_every_command_is_documented() -> None:
    """Each command has a help text of its own, with an example that names it and the shared options."""
    assert sorted(cli.commands) == sorted([*COMMANDS, "completion"])
    for name in COMMANDS:
        text = run(name, "--help").stdout
        assert f"kvd-client {name}" in text
        for option in ("--data-dir", "--socket", "--namespace", "--json"):
            assert option in text
    assert isinstance(cli, click.Group)
    assert "130" in run("--help").stdout


@pytest.fixture
def _hears_ctrl_c() -> Iterator[None]:
    """A run in the background of a shell ignores SIGINT, and children inherit that; for this test they do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hears_ctrl_c")
@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_cancels_and_exits_with_130(service: FakeService, signals: int) -> None:
    """SIGINT during a generation cancels it in the daemon; the exit code is 130, and one line says so.

    One more while the process ends changes nothing: no traceback, no other exit code.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "kvd_client", "generate", "hangs", "--text", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == "…".encode()
        process.send_signal(signal.SIGINT)
        try:
            if signals == 2:
                assert service.was_cancelled.wait(20)
                process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)
        finally:
            process.kill()  # nothing to do when it has ended
    assert process.returncode == 130
    assert stderr == b"\nkvd-client: interrupted; the call was cancelled\n"
    assert service.was_cancelled.wait(20)


class ManualTimer:
    """A timer that a test fires."""

    def __init__(self, delay_s: float, call: Callable[[], None]) -> None:
        self.delay_s, self.fire, self.started, self.cancelled = delay_s, call, False, False

    def start(self) -> None:
        """Note it."""
        self.started = True

    def cancel(self) -> None:
        """Note it."""
        self.cancelled = True


class Screen(io.StringIO):
    """A terminal's text."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def wait_on(out: io.StringIO | None, now_s: list[float]) -> tuple[Waiting, ManualTimer]:
    """The line of a call, its timer and its clock in the test's hands."""
    timers: list[ManualTimer] = []

    def timer(delay_s: float, call: Callable[[], None]) -> ManualTimer:
        timers.append(ManualTimer(delay_s, call))
        return timers[-1]

    return Waiting(out, timer=timer, clock=lambda: now_s[0]), timers[0]


def test_a_long_prefill_is_told_on_a_terminal_and_its_line_taken_away() -> None:
    """Nothing in the first two seconds, then one line that is written anew; text ends it."""
    out, now_s = Screen(), [0.0]
    waiting, timer = wait_on(out, now_s)
    assert (timer.started, timer.delay_s) == (True, 2.0)
    waiting.see(Queued(3))
    assert out.getvalue() == ""
    timer.fire()
    waiting.see(Prefill(512, 2000))
    waiting.see(FirstToken())
    waiting.see(Prefill(1024, 2000))
    assert timer.cancelled
    assert out.getvalue().split("\r\x1b[K") == [
        "",
        "waiting for 3 requests before it",
        "computing 512 of 2000 tokens",
        "",
    ]


def test_a_long_prefill_is_told_line_by_line_elsewhere() -> None:
    """In a file: whole lines, ten seconds apart, none taken back; a quick answer leaves none."""
    out, now_s = io.StringIO(), [0.0]
    waiting, timer = wait_on(out, now_s)
    waiting.see(Prefill(512, 2000))
    timer.fire()
    waiting.see(Prefill(1024, 2000))
    now_s[0] = 10.5
    waiting.see(Prefill(1536, 2000))
    waiting.end()
    lines = ["kvd-client: computing 512 of 2000 tokens", "kvd-client: computing 1536 of 2000 tokens"]
    assert out.getvalue().splitlines() == lines
    quick, silent = io.StringIO(), wait_on(None, now_s)
    waiting, timer = wait_on(quick, now_s)
    waiting.end()
    timer.fire()  # it was on its way already
    assert quick.getvalue() == ""
    assert not silent[1].started


def test_a_slow_answer_is_told_by_the_command(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` says on stderr that it waits, `generate --json` in a pipe does not; stdout is the same."""
    monkeypatch.setitem(Waiting.__init__.__kwdefaults__, "timer", lambda delay_s, call: FiredTimer(call))
    result = run("generate", "alice", "--text", "hi")
    assert result.stdout == "".join(WORDS)
    assert result.stderr.startswith("kvd-client: waiting for the daemon\n")
    assert run("generate", "alice", "--text", "hi", "--json").stderr == ""
    assert "waiting for the daemon to compute it" in run("inject", "alice", "--text", "hi").stderr


class FiredTimer(ManualTimer):
    """A timer whose time has come when it starts."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(0.0, call)

    def start(self) -> None:
        """Fire."""
        self.fire()
