"""Commands that are imported when they are run: what stands for them says the same, and `--help` loads little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.bench.cli import bench
from kvd.cli import main
from kvd_client.cli import cli
from kvd_client.cli_lazy import Deferred, LazyGroup, loaded

GROUPS = {"kvd": main, "kvd bench": bench, "kvd-client": cli}


@pytest.mark.parametrize("name", GROUPS)
def test_stand_ins_say_what_the_commands_say(name: str) -> None:
    """Each stand-in has its command's name, and in the list the first sentence of its help."""
    group = GROUPS[name]
    assert isinstance(group, LazyGroup)
    for each, command in group.commands.items():
        assert isinstance(command, Deferred)
        real = loaded(command)
        assert not isinstance(real, Deferred)
        assert real.name == each
        assert command.get_short_help_str(1000) == real.get_short_help_str(1000)


def test_a_stand_in_gives_way(tmp_path: Path) -> None:
    """Help of a command and of one below it are the real ones; a misspelt name is refused by name."""
    run = CliRunner()
    assert "--decode-share" in run.invoke(main, ["serve", "--help"]).output
    assert "Example: kvd model info" in run.invoke(main, ["model", "info", "--help"]).output
    refused = run.invoke(main, ["serv"])
    assert refused.exit_code == 2
    assert "serv" in refused.output
    file = tmp_path / "kvd.toml"
    file.write_text(f'model_dir = "{tmp_path}"\n')
    listed = run.invoke(main, ["--config", str(file), "model", "list", "--json"], env={"KVD_MODEL_DIR": None})
    assert f'"model_dir": "{tmp_path}"' in listed.output


HEAVY = {"mlx", "numpy", "structlog", "rich", "msgpack", "safetensors", "starlette", "asyncio", "sqlite3"}


@pytest.mark.parametrize(
    ("arguments", "besides"),
    [
        (["kvd", "--help"], set()),
        (["kvd", "serve", "--help"], {"msgpack"}),
        (["kvd_client", "--help"], set()),
        (["kvd_client", "generate", "--help"], {"msgpack"}),
    ],
    ids=" ".join,
)
def test_help_loads_little(arguments: list[str], besides: set[str]) -> None:
    """`--help` imports neither mlx nor numpy nor any other library that takes long."""
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try: runpy.run_module(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print({name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert "Usage:" in done.stdout
    assert {name for name in HEAVY if f"'{name}'" in done.stderr} <= besides


def test_a_group_of_ones_own() -> None:
    """A command is imported when its context is made, not when the group is listed."""
    group = LazyGroup("group", lazy={"broken": ("kvd.no_such_module:command", "Never there.")})
    assert "Never there." in CliRunner().invoke(group, ["--help"]).output
    assert isinstance(CliRunner().invoke(group, ["broken"]).exception, ModuleNotFoundError)
