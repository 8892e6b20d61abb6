"""Completion in shells, through click's protocol: variables say what is typed, standard output what it may become."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvd.cli import main
from kvd.front import CallContext
from kvd_client import cli_completion
from kvd_client.cli import cli
from kvd_client.cli_completion import SHELLS
from tests.front.service import FakeService, serving

NAMES = {
    "default": ("alice", "albert", "bob", "gw:anonymous:1", "two words", "$(reboot)"),
    "team": ("alice", "anton", "bella"),
}


class WithAgents(FakeService):
    """Has agents with names of all kinds, in two namespaces."""

    async def do_agent_list(self, params: Mapping[str, Any], context: CallContext) -> object:
        """As the daemon's."""
        asked = params.get("namespace")
        wanted = NAMES if asked is None else {asked: NAMES.get(asked, ())}
        return {"agents": [{"agent": name, "namespace": of} for of, names in wanted.items() for name in names]}


@pytest.fixture
def here(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The socket that is meant where nothing is said; a daemon there may take its time, whatever keeps it busy."""
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    monkeypatch.setenv("KVD_DATA_DIR", str(short_tmp))
    monkeypatch.setattr(cli_completion, "PATIENCE_S", 60.0)
    return short_tmp / "kvd.sock"


@pytest.fixture
def service(here: Path) -> Iterator[WithAgents]:
    """A live server there."""
    with serving(here, WithAgents()) as service:
        assert isinstance(service, WithAgents)
        yield service


def completions(program: click.Command, typed: str, **environment: str) -> list[str]:
    """What bash would offer after `typed`, whose last word is being completed."""
    words = typed.split(" ")
    name = words[0]
    variables = {
        f"_{name.replace('-', '_').upper()}_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    result = CliRunner().invoke(program, [], prog_name=name, env={**variables, **environment})
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return [line.partition(",")[2] for line in result.stdout.splitlines() if line]


def test_commands_and_options() -> None:
    """Names of commands, of those below them, and options of the command that is typed."""
    assert completions(cli, "kvd-client re") == ["residency"]
    assert {"serve", "service"} == set(completions(main, "kvd se"))
    assert completions(main, "kvd model i") == ["import", "info"]
    assert completions(main, "kvd bench ca") == ["capacity"]
    assert completions(main, "kvd serve --eviction ") == ["lru", "reuse"]
    assert completions(main, "kvd serve --decode") == ["--decode-share"]
    assert completions(main, "kvd nonsense x") == []


def test_names_of_agents(service: WithAgents) -> None:
    """From the running daemon; names that a shell would take apart are not offered, the gateway's when asked for."""
    assert completions(cli, "kvd-client show ") == ["albert", "alice", "bob"]
    assert completions(cli, "kvd-client generate al") == ["albert", "alice"]
    assert completions(cli, "kvd-client inject alice b") == ["bob"]
    assert completions(cli, "kvd-client show gw:") == ["gw:anonymous:1"]
    assert completions(cli, "kvd-client show tw") == []


def test_where_the_daemon_is_counts(service: WithAgents, short_tmp: Path) -> None:
    """Options on either side of the command say where; what is typed may be wrong in any way."""
    at = str(short_tmp / "kvd.sock")
    nowhere = {"KVD_DATA_DIR": "/nowhere"}
    assert completions(cli, f"kvd-client --socket {at} show b", **nowhere) == ["bob"]
    assert completions(cli, f"kvd-client show --socket {at} b", **nowhere) == ["bob"]
    assert completions(cli, "kvd-client show b", **nowhere) == []
    assert completions(cli, "kvd-client show --data-dir b") == []


def test_names_are_those_that_the_command_would_find(service: WithAgents) -> None:
    """Those of the namespace in which it acts, said on either side of it or not at all; no other's name is shown."""
    assert completions(cli, "kvd-client show a") == ["albert", "alice"]
    assert completions(cli, "kvd-client events --agent a") == ["albert", "alice"]
    assert completions(cli, "kvd-client --namespace team show a") == ["alice", "anton"]
    assert completions(cli, "kvd-client show --namespace team ") == ["alice", "anton", "bella"]
    assert completions(cli, "kvd-client --namespace default show --namespace team b") == ["bella"]
    assert completions(cli, "kvd-client show --namespace nobodys ") == []


def test_a_daemon_that_does_not_answer_is_left(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No names then, and no error in the middle of the line; the call is cancelled."""
    monkeypatch.setattr(cli_completion, "PATIENCE_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listening:  # whose connections nobody takes
        listening.bind(str(here))
        listening.listen()
        assert completions(cli, "kvd-client show a") == []
        connection, _ = listening.accept()
        with connection:
            sent = connection.makefile("rb").read()
    assert b"agent.list" in sent
    assert b"cancel" in sent


def test_names_of_models(tmp_path: Path) -> None:
    """Installed ones and those that can be pulled."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    (tmp_path / "notes").mkdir()
    offered = completions(main, "kvd serve --model ", KVD_MODEL_DIR=str(tmp_path))
    assert {"mine", "smollm2-135m"} <= set(offered)
    assert "notes" not in offered
    assert completions(main, "kvd model info m", KVD_MODEL_DIR=str(tmp_path)) == ["mine"]
    assert completions(main, f"kvd calibrate --model-dir {tmp_path} mi", KVD_MODEL_DIR="/nowhere") == ["mine"]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("program", "name"), [(cli, "kvd-client"), (main, "kvd")], ids=["kvd-client", "kvd"])
def test_the_script(program: click.Command, name: str, shell: str) -> None:
    """It names the program and the variable that the program reads; other shells are refused by name."""
    script = CliRunner().invoke(program, ["completion", shell], prog_name=name).stdout
    assert f"_{name.replace('-', '_').upper()}_COMPLETE={shell}_complete" in script
    assert name in script
    refused = CliRunner().invoke(program, ["completion", "tcsh"], prog_name=name)
    assert refused.exit_code == 2
    assert all(each in refused.output for each in SHELLS)
