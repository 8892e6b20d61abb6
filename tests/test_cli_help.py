"""What `kvd --help` and the help of its commands must tell: where things lie, variables, defaults, exit codes."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvd.cli import main
from kvd.cli_common import unusable
from kvd_client.cli_lazy import loaded
from tests.test_docs import all_commands


def helped(*words: str) -> str:
    """A help text as one line."""
    result = CliRunner().invoke(main, [*words, "--help"])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.replace("-\n", "-").split())


def test_serve_says_where_things_lie_and_which_variables_count() -> None:
    """The data folder and the socket have no default that click could show; sizes are shown as people write them."""
    text = helped("serve")
    for words in (
        "[default: kvd in the user's data folder]",
        "[default: kvd.sock in the data folder]",
        "[default: 10.2 GB]",
        "[default: 100 GB]",
        "KVD_DATA_DIR",
    ):
        assert words in text
    assert "(100GB)" not in text


@pytest.mark.parametrize("name", ["serve", "demo", "calibrate"])
def test_every_variable_is_shown(name: str) -> None:
    """An option that a variable sets says so."""
    params = loaded(main.commands[name]).params
    options = [option for option in params if isinstance(option, click.Option) and option.envvar]
    assert options
    for option in options:
        assert str(option.envvar) in helped(name)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), "2 wrong usage"),
        (("bench", "ppl"), "Example: kvd bench ppl"),
        (("bench", "serve"), "Example: kvd bench serve"),
        (("model", "list"), "Example: kvd model list"),
        (("model", "info"), "Example: kvd model info"),
    ],
    ids=str,
)
def test_exit_codes_and_examples(words: tuple[str, ...], shown: str) -> None:
    """Exit codes once, an example for each command."""
    assert shown in helped(*words)


def test_a_folder_that_cannot_be_made_is_named_as_what_it_is() -> None:
    """Not only the system's reason: which setting it was, and how to give another."""
    refused = unusable(FileNotFoundError(2, "No such file or directory", "/proc/x"), Path("/proc/x/kvd"))
    assert refused.startswith("the data folder /proc/x/kvd cannot be made or used: No such file or directory: /proc/x")
    assert "--data-dir" in refused
    assert (
        unusable(PermissionError(13, "Permission denied", "/var/log/k"), Path("/d")) == "Permission denied: /var/log/k"
    )
    assert "/d" in unusable(OSError(28, "No space left on device"), Path("/d"))


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """As documented, also for a command that has no words of its own for it; click alone would say 1 and `Aborted!`."""

    def interrupted() -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvd.cli_config.default_config_file", interrupted)
    result = CliRunner().invoke(main, ["--config", "", "config", "path"])
    assert (result.exit_code, result.stderr) == (130, "kvd: interrupted\n")


def test_commands_that_print_facts_have_json() -> None:
    """The README says so; the others do something, or print what is read by another program as it is."""
    others = {"completion", "install", "logs", "serve", "uninstall"}
    without = {
        path.split()[-1]
        for path, command in all_commands()
        if not isinstance(command, click.Group) and not any("--json" in param.opts for param in command.params)
    }
    assert without == others
