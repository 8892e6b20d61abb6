"""`kvd serve --http`: the gateway as the daemon's child, and `kvd gateway` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvd.cli import main
from tests.gateway.serving import Reply, Served
from tests.support.daemon import Daemon, daemon_environment, eventually, short_folder
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon


@pytest.fixture(scope="module")
def daemon(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Daemon]:
    """A daemon with a gateway on a free port."""
    options = ("--check", "--http", "127.0.0.1:0")
    with short_folder() as folder, Daemon(folder, tiny_model_dir, options, zygote=zygote) as running:
        yield running


def listening(daemon: Daemon, nth: int) -> dict[str, Any]:
    """What the nth gateway said when it listened."""

    def lines() -> list[dict[str, Any]]:
        return [line for line in daemon.log_lines() if line.get("event") == "listening"]

    eventually(lambda: len(lines()) > nth, f"gateway {nth} listens")
    return lines()[nth]


def test_a_gateway_that_dies_costs_no_cache(daemon: Daemon) -> None:
    """`kill -9` of it: the daemon starts another one, and the agent's next turn is a hit; both end with the daemon."""
    first = listening(daemon, 0)
    name = daemon.client.model_info()["model"]
    text = "the time of a system " * 30

    def turn(url: str) -> Reply:
        body = {"model": name, "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
        served = Served(url, log=None, gateway=None, loop=None)  # type: ignore[arg-type]
        return served.post("/v1/chat/completions", body, x_kvd_agent="kept")

    before = turn(first["url"]).json["usage"]
    pid = next(line["pid"] for line in daemon.log_lines() if line.get("event") == "gateway_started")
    os.kill(pid, signal.SIGKILL)
    second = listening(daemon, 1)
    after = turn(second["url"]).json["usage"]
    assert after["prompt_tokens_details"]["cached_tokens"] == before["prompt_tokens"] - 1
    daemon.kill()  # no word of farewell: the pipe tells the child
    eventually(lambda: not accepts(second["url"]), "the gateway ended with its daemon")


def accepts(url: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


def test_a_gateway_that_cannot_listen_says_why_in_the_daemons_log(tiny_model_dir: Path, zygote: Zygote | None) -> None:
    """The daemon serves; why HTTP does not come stands in the record of the end, and nothing but records in the log."""
    with socket.create_server(("127.0.0.1", 0)) as taken, short_folder() as folder:
        port = taken.getsockname()[1]
        with Daemon(folder, tiny_model_dir, ("--http", f"127.0.0.1:{port}"), zygote=zygote) as running:

            def ends() -> list[dict[str, Any]]:
                return [line for line in running.log_lines() if line.get("event") == "gateway_ended"]

            eventually(ends, "the gateway ended")
            assert ends()[0]["exit_code"] == 1
            assert f"cannot listen on 127.0.0.1:{port}" in ends()[0]["reason"]
            assert "in use" in ends()[0]["reason"]
            text = running.log.read_text().splitlines()
            assert [line for line in text if "cannot listen" in line and not line.startswith("{")] == []
            assert running.client.health().ready
            eventually(lambda: running.client.health().server["gateway_fault"], "health says it, too")


def test_a_gateway_of_its_own_ends_when_it_is_told() -> None:
    """It says where it listens, serves without a daemon, too, and SIGTERM is a clean end."""
    with short_folder() as folder:
        command = [sys.executable, "-m", "kvd", "gateway", "--listen", "127.0.0.1:0", "--socket", str(folder / "none")]
        log = (folder / "log").open("wb")
        with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=daemon_environment()) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            assert Served(url, log=None, gateway=None, loop=None).ask("GET", "/health").status == 503  # type: ignore[arg-type]
            process.terminate()
            assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--http", "nowhere"], "HOST:PORT"),
        (["serve", "--http", "0.0.0.0:80"], "KVD_GATEWAY_API_KEY_FILE"),
        (["gateway", "--listen", "0.0.0.0:0"], "--api-key-file"),
        (["gateway", "--max-body", "1GB"], "max-body"),
        (["gateway", "--api-key-file", "/nonexistent/keys"], "cannot be read"),
    ],
)
def test_addresses_and_keys_are_checked_at_the_start(arguments: list[str], named: str) -> None:
    """Exit code 2 and the reason, before anything is loaded."""
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert named in done.output
