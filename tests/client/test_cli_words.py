"""What `kvd-client` takes and how it says no: the daemon's ranges, its refusals in the words of the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvd.errors import InvalidParams
from kvd.scheduler.params import MAX_NEW_TOKENS, MAX_TIMEOUT_S
from kvd.scheduler.sampling import SamplingParams
from kvd_client.cli import cli
from kvd_client.cli_lazy import loaded
from kvd_client.cli_words import PHRASES, command_words
from kvd_client.errors import RemoteError, local_error, remote_error
from kvd_client.wire.codes import CODES, ErrorObject
from tests.front.service import FakeService, serving

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


@pytest.fixture
def service(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    """A live server at the socket of KVD_DATA_DIR."""
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    monkeypatch.setenv("KVD_DATA_DIR", str(short_tmp))
    with serving(short_tmp / "kvd.sock") as service:
        yield service


def range_of(name: str) -> click.IntRange | click.FloatRange:
    """The range that an option of `generate` states."""
    (param,) = (each for each in loaded(cli.commands["generate"]).params if each.name == name)
    assert isinstance(param.type, click.IntRange | click.FloatRange)
    return param.type


def is_taken(name: str, value: float) -> bool:
    """Whether the daemon takes a value."""
    given: dict[str, Any] = {name: value}
    try:
        SamplingParams(**given)
    except InvalidParams:
        return False
    return True


@pytest.mark.parametrize("name", SAMPLING)
def test_ranges_are_the_daemons(name: str) -> None:
    """Each end of a range is taken, unless it is open, and what is just beyond it is not."""
    stated = range_of(name)
    step = 1 if isinstance(stated, click.IntRange) else 1e-9
    assert stated.min is not None
    assert is_taken(name, stated.min) is not stated.min_open
    assert not is_taken(name, stated.min - step)
    assert is_taken(name, stated.min + step)
    if name in ("top_k",):
        return
    assert stated.max is not None
    assert is_taken(name, stated.max) is not stated.max_open
    beyond = stated.max + 1 if isinstance(stated, click.IntRange) else math.nextafter(stated.max, math.inf)
    assert not is_taken(name, beyond)


def test_other_ranges_are_the_daemons() -> None:
    """Those that the daemon states as constants."""
    assert range_of("max_tokens").max == MAX_NEW_TOKENS
    assert range_of("timeout_s").max == MAX_TIMEOUT_S


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "200"],
        ["--top-p", "0"],
        ["--min-p", "1"],
        ["--repetition-penalty", "0"],
        ["--seed", "-1"],
        ["--max-tokens", "1000001"],
    ],
    ids=lambda given: given[0],
)
def test_out_of_range_is_wrong_usage(service: FakeService, arguments: list[str]) -> None:
    """Exit code 2, the option and what is allowed, before the daemon is asked."""
    result = CliRunner().invoke(cli, ["generate", "a", "--text", "x", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert "range" in result.stderr
    assert service.calls == []


def test_what_the_daemon_refuses_is_wrong_usage(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """`invalid_params` exits with 2: sizes and names are checked by the daemon; the option is named as it is typed."""

    def refuse(message: str, parameter: str) -> None:
        def answer(*_arguments: object, **_named: object) -> object:
            raise remote_error(
                ErrorObject(CODES["invalid_params"], "invalid_params", message, {"parameter": parameter}, None)
            )

        monkeypatch.setattr("kvd_client.client.Client.configure", answer)
        monkeypatch.setattr("kvd_client.client.Client.agent_info", answer)

    refuse("budget 'foo' is not a size: give a number", "budget")
    result = CliRunner().invoke(cli, ["budget", "foo"])
    assert (result.exit_code, result.stderr) == (2, "kvd-client: SIZE 'foo' is not a size: give a number\n")
    refuse("agent must be 1 to 128 printable characters, not ''", "agent")
    result = CliRunner().invoke(cli, ["show", ""])
    assert result.exit_code == 2
    assert result.stderr == "kvd-client: AGENT must be 1 to 128 printable characters, not ''\n"
    as_json = CliRunner().invoke(cli, ["show", "", "--json"]).stderr
    assert as_json.startswith("kvd-client: invalid_params: agent must be"), "programs read the protocol's names"


@pytest.mark.parametrize(
    ("parameter", "message", "said"),
    [
        ("messages", "messages[1].role must be user", "messages[1].role must be user"),
        ("messages", "messages must be a list", "--message must be a list"),
        ("stop", "stop[0] must be text", "--stop[0] must be text"),
    ],
)
def test_one_message_of_a_conversation_is_not_an_option(parameter: str, message: str, said: str) -> None:
    """It may be of --system, --messages-file or --message; an element of a repeated option is that option's."""
    error = remote_error(
        ErrorObject(CODES["invalid_params"], "invalid_params", message, {"parameter": parameter}, None)
    )
    assert command_words(error, loaded(cli.commands["chat"])) == said


@pytest.mark.parametrize("phrase", sorted(PHRASES))
def test_phrases_are_ones_that_the_daemon_says(phrase: str) -> None:
    """A message that was reworded over there would reach people untranslated."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "kvd").rglob("*.py"))
    assert any(phrase in source for source in sources)


def test_advice_names_options() -> None:
    """The daemon speaks of fields of the protocol; what it quotes stays as it is."""

    def said(name: str, message: str) -> str:
        error = local_error(name, message)
        assert isinstance(error, RemoteError)
        return command_words(error, loaded(cli.commands["import"]))

    assert said("agent_exists", "agent replace exists already; replace overwrites it").endswith(
        "agent replace exists already; --replace overwrites it"
    )
    assert "give --on-context-full stop" in said(
        "context_full", "9 tokens exceed 8; lower max_tokens, or send on_context_full: stop"
    )
    assert "kvd serve" in said("draining", "the daemon is draining and takes no new requests")


def test_a_named_file_says_where_the_daemon_is(
    service: FakeService, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--config before or after the command, where no flag or variable says more; a missing one is wrong usage."""
    monkeypatch.setenv("KVD_CONFIG", "")
    monkeypatch.delenv("KVD_DATA_DIR")
    file = short_tmp / "kvd.toml"
    file.write_text(f'socket = "{short_tmp}/kvd.sock"\n')
    for words in (["health", "--config", str(file)], ["--config", str(file), "health"]):
        assert CliRunner().invoke(cli, words).exit_code == 0
    monkeypatch.setenv("KVD_SOCKET", "/nowhere/s")
    assert CliRunner().invoke(cli, ["health", "--config", str(file)]).exit_code == 3, "a variable wins over the file"
    monkeypatch.delenv("KVD_SOCKET")
    missing = CliRunner().invoke(cli, ["health", "--config", str(short_tmp / "none.toml")])
    assert missing.exit_code == 2
    assert "none.toml" in missing.stderr
