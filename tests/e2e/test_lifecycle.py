"""A daemon's life: start, second starts, modes of its files, log lines, drains, stops."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kvd_client import errors
from kvd_client.stream import Text
from tests.support.daemon import Daemon, MakeDaemon, eventually, run_kvd
from tests.support.prose import prose
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

LONG = 1200
"""New tokens that take a few seconds."""


def test_a_second_daemon_on_the_same_data_is_refused(daemon: Daemon) -> None:
    """Two writers never share a data folder: the second names the first's pid, ends with 1, and changes nothing."""
    before = daemon.client.generate("first", prose(20, "first"), max_tokens=2)
    other_socket = str(daemon.folder / "other.sock")
    second = run_kvd(
        *("serve", "--data-dir", str(daemon.data_dir), "--model", str(daemon.model), "--socket", other_socket)
    )
    assert second.code == 1
    assert str(daemon.pid) in second.stderr
    assert "Traceback" not in second.stderr
    assert not Path(other_socket).exists()
    again = daemon.client.generate("first", prose(20, "first") + before.text, max_tokens=1)
    assert again.match == "exact"


def test_a_second_daemon_on_the_same_socket_is_refused(daemon: Daemon, short_tmp: Path, zygote: Zygote | None) -> None:
    """A socket that somebody answers is never taken over."""
    where = ("--data-dir", str(short_tmp / "data"), "--socket", str(daemon.socket))
    second = run_kvd("serve", "--model", str(daemon.model), *where, zygote=zygote)
    assert second.code == 1
    assert str(daemon.socket) in second.stderr
    assert daemon.client.health().ready


def test_a_socket_path_that_is_too_long_is_refused(
    short_tmp: Path, tiny_model_dir: Path, zygote: Zygote | None
) -> None:
    """The message has the path's bytes and the platform's limit."""
    path = short_tmp / ("long" * 30) / "kvd.sock"
    refused = run_kvd(
        *("serve", "--data-dir", str(short_tmp / "data"), "--model", str(tiny_model_dir), "--socket", str(path)),
        zygote=zygote,
    )
    assert refused.code == 2
    assert str(len(os.fsencode(path))) in refused.stderr
    assert "platform takes 10" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_files_are_private_under_any_umask(make_daemon: MakeDaemon) -> None:
    """P37: with umask 0 every folder is 0700 and every file 0600: prompts are in all of them."""
    made = make_daemon("--budget", "512MiB", umask=0)
    log_file = made.folder / "logs" / "daemon.log"
    made.options += ["--log-file", str(log_file)]
    with made as daemon:
        assert daemon.client.hello()["budget_bytes"] == 512 << 20
        daemon.client.inject("private", prose(600, "private"))
        daemon.client.evict("private")
        paths = [daemon.data_dir, *daemon.data_dir.rglob("*"), log_file]
        kinds = Counter(path.suffix for path in paths)
        assert kinds[".safetensors"] == 2
        assert {".log", ".sock", ".lock", ".sqlite3"} <= set(kinds)
        modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in paths}
        wrong = {str(path): oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)}
        assert wrong == {}


def test_each_request_leaves_one_line(daemon: Daemon) -> None:
    """P38: one `request` line for each request, whatever its end; nothing else, and never a word of the prompt."""
    client = daemon.client
    client.inject("log-before", "x")
    eventually(lambda: daemon.log_lines()[-1].get("agent") == "log-before", "lines of earlier requests are written")
    before = len(daemon.log_lines())
    client.generate("log", " first second", max_tokens=20)
    client.generate("log", " diverges at once", max_tokens=2, stream=False)
    client.inject("log", " injected")
    client.fork("log", "log-2")
    client.delete("log-2")
    with pytest.raises(errors.ContextFull):
        client.generate("log", prose(4090, "log"), max_tokens=100)
    with daemon.new_client() as other, other.generate_stream("log", prose(10, "log"), max_tokens=LONG) as stream:
        assert any(isinstance(event, Text) for event in stream)
    client.health()
    client.statistics()
    eventually(lambda: client.health().server["running"] == 0, "the cancelled request ends")
    eventually(lambda: len(daemon.log_lines()) >= before + 7, "the last line is written, after its answer")
    lines = daemon.log_lines()[before:]
    assert [line["event"] for line in lines] == ["request"] * 7
    assert [line["level"] for line in lines[:5]] == ["info"] * 5
    text = daemon.log.read_text()
    assert "injected" not in text.replace('"injected"', "")
    assert "diverges at once" not in text


def test_calls_wait_while_the_model_loads(make_daemon: MakeDaemon) -> None:
    """The socket answers before the model is there: health says `loading`, a call waits and is served."""
    daemon = make_daemon()
    daemon.zygote = None  # a start that takes its time
    daemon.spawn()
    eventually(daemon.socket.exists, "the socket is there")
    with daemon.new_client() as client:
        health = None
        while health is None:
            with suppress(errors.DaemonUnreachable):
                health = client.health()
        assert (health.ready, health.status) == (False, "loading")
        assert daemon.cli("health", "--json").code in (0, 1)
        assert client.generate("early", prose(10, "early"), max_tokens=2).match == "new"
        assert client.health().ready


def test_a_file_in_the_socket_s_place_is_refused(short_tmp: Path, tiny_model_dir: Path, zygote: Zygote | None) -> None:
    """Only stale sockets are replaced; a file of the user's is named and left alone."""
    path = short_tmp / "kvd.sock"
    path.write_text("a file of the user's")
    refused = run_kvd(
        *("serve", "--data-dir", str(short_tmp / "data"), "--model", str(tiny_model_dir), "--socket", str(path)),
        zygote=zygote,
    )
    assert refused.code == 2
    assert "is no socket" in refused.stderr
    assert path.read_text() == "a file of the user's"


def test_a_data_folder_that_cannot_be_made_is_one_line(
    short_tmp: Path, tiny_model_dir: Path, zygote: Zygote | None
) -> None:
    """What the system refuses is told with the path, without a traceback, with exit code 1."""
    (short_tmp / "file").write_text("no folder")
    path = short_tmp / "file" / "data"
    refused = run_kvd(
        *("serve", "--data-dir", str(path), "--model", str(tiny_model_dir), "--socket", str(short_tmp / "kvd.sock")),
        zygote=zygote,
    )
    assert refused.code == 1
    assert refused.stderr.count("\n") == 1
    assert str(path) in refused.stderr


def test_sigterm_lets_the_running_request_finish(make_daemon: MakeDaemon) -> None:
    """P2: a stop drains: the stream goes on to its end and is durable, new work is refused, the exit code is 0."""
    daemon = make_daemon().start()
    text = prose(100, "term")
    with daemon.new_client() as client, client.generate_stream("term", text, max_tokens=400) as stream:
        events = iter(stream)
        assert any(isinstance(event, Text) for event in events)
        daemon.signal(signal.SIGTERM)
        eventually(lambda: daemon.client.health().status == "draining", "the daemon drains")
        assert not daemon.client.health().ready
        with pytest.raises(errors.Draining):
            daemon.client.generate("late", text, max_tokens=1)
        result = stream.result
    assert (result.finish_reason, result.durable) == ("length", True)
    assert daemon.wait() == 0
    assert daemon.log_lines()[-1]["event"] == "stopped"
    with daemon:
        again = daemon.client.generate("term", text + result.text, max_tokens=1)
        assert again.match == "exact"
        assert again.cached_tokens >= again.prompt_tokens - 1


def test_a_second_signal_forces_the_end(make_daemon: MakeDaemon) -> None:
    """P2: what was durable is there after a forced end; the socket it leaves behind does not hinder the next start.

    Then the grace: a request longer than it is cancelled, not lost. Its client is told, its KV is there afterwards.
    """
    daemon = make_daemon().start()
    text = prose(300, "forced")
    first = daemon.client.generate("forced", text, max_tokens=5)
    with daemon.new_client() as client, client.generate_stream("forced", text, max_tokens=LONG) as stream:
        events = iter(stream)
        assert any(isinstance(event, Text) for event in events)
        daemon.signal(signal.SIGTERM)
        eventually(lambda: daemon.client.health().status == "draining", "the daemon drains")

        def ended() -> bool:
            daemon.signal(signal.SIGINT)  # within half a second of the first it is the same wish
            return daemon.process.poll() is not None

        eventually(ended, "the daemon ends by force")
        assert daemon.wait(5) == 130
        with pytest.raises(errors.ConnectionLost):
            _ = stream.result
    assert stat.S_ISSOCK(daemon.socket.lstat().st_mode)
    daemon.options += ["--drain-grace", "0.3"]
    daemon.start()
    again = daemon.client.generate("forced", text + first.text, max_tokens=1)
    assert again.cached_tokens == again.prompt_tokens - 1

    with daemon.new_client() as client, client.generate_stream("grace", text, max_tokens=3700) as stream:
        events = iter(stream)
        assert any(isinstance(event, Text) for event in events)
        daemon.signal(signal.SIGTERM)
        with pytest.raises(errors.Cancelled, match="grace"):
            _ = stream.result
    assert daemon.wait() == 0
    with daemon:
        graced = daemon.client.agent_info("grace")
        assert graced.computed_tokens > 300
        assert daemon.client.generate("grace", text, max_tokens=1).cached_tokens == 299


def test_drain_and_shutdown_by_call(make_daemon: MakeDaemon) -> None:
    """`drain` returns when the running request has ended; then only looking is allowed, until `shutdown` ends it."""
    daemon = make_daemon().start()
    with ThreadPoolExecutor(max_workers=1) as pool, daemon.new_client() as client:
        running = pool.submit(client.generate, "drain", prose(20, "drain"), max_tokens=200)
        eventually(lambda: daemon.client.health().server["running"] == 1, "the request runs")
        assert daemon.client.drain() == {"drained": True}
        assert running.result(1).durable
    with pytest.raises(errors.Draining):
        daemon.client.generate("late", prose(20, "late"))
    assert daemon.cli("health").code == 1
    assert daemon.client.agent_info("drain").computed_tokens > 200
    assert daemon.client.shutdown() == {"stopping": True}
    assert daemon.wait() == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, pytest.raises(FileNotFoundError):
        probe.connect(str(daemon.socket))
    assert daemon.cli("health").code == 3
