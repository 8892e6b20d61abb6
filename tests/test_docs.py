"""The documentation names everything a user can type, set, call or read: read from the code, not from a list.

Sources of truth: the click commands, the variables the code reads, the tables of wire errors and methods, the typed
results and stream events, the statistics, the page formats, the Makefile.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import click
import pytest

from kvd_client.cli_lazy import loaded

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
INTERNAL_VARIABLES = {"KVD_LAUNCHER_SET"}
"""Set by us for our own children; nobody else has a use for them."""


def text_of(*names: str) -> str:
    """The text of some documentation pages; all of them if none is named."""
    chosen = [ROOT / name for name in names] or PAGES
    return "\n".join(path.read_text(encoding="utf-8") for path in chosen)


def absent(words: set[str], text: str) -> list[str]:
    """Words that do not stand in a text as words of their own."""
    return sorted(word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text))


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command and group under one, with what the user types."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)  # a group may load its commands when they are asked for
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(loaded(inner), f"{path} {name}")


def all_commands() -> list[tuple[str, click.Command]]:
    """The commands of both programs."""
    from kvd.cli import main as daemon_main
    from kvd_client.cli import cli as client_main

    return [*commands(daemon_main, "kvd"), *commands(client_main, "kvd-client")]


def test_every_command_is_documented() -> None:
    """`kvd serve`, `kvd-client fork` and so on, as they are typed."""
    leaves = {path for path, command in all_commands() if not isinstance(command, click.Group)}
    assert len(leaves) > 10
    assert absent(leaves, text_of()) == []


def test_every_option_is_documented() -> None:
    """Each long option of each command."""
    options = {
        max(parameter.opts, key=len)
        for _, command in all_commands()
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
    }
    assert len(options) > 10
    assert absent(options, text_of()) == []


def test_every_environment_variable_is_documented() -> None:
    """Each `KVD_…` in the sources, and each variable an option reads."""
    found = {
        name
        for folder in (ROOT / "kvd", ROOT / "client")
        for path in folder.rglob("*.py")
        for name in re.findall(r"\bKVD_[A-Z][A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    for _, command in all_commands():
        for parameter in command.params:
            names = parameter.envvar or []
            found.update([names] if isinstance(names, str) else names)
    assert "KVD_THREADS" in found
    assert absent(found - INTERNAL_VARIABLES, text_of()) == []


def test_every_command_helps() -> None:
    """Each command and option has a help text, and `--help` works."""
    for path, command in all_commands():
        assert command.help, f"{path} has no help text"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{path} {parameter.opts[0]} has no help text"
        with click.Context(command, info_name=path) as context:
            assert path in command.get_help(context)


def test_every_wire_error_is_documented() -> None:
    """Name and code on one line of docs/protocol.md."""
    from kvd_client.wire.codes import CODES

    lines = text_of("docs/protocol.md").splitlines()
    missing = [
        f"{code} {name}"
        for name, code in CODES.items()
        if not any(f"`{name}`" in line and re.search(rf"\b{code}\b", line) for line in lines)
    ]
    assert missing == []


def test_every_method_is_documented() -> None:
    """Each method that the service answers, in docs/protocol.md."""
    from kvd.scheduler.service import KvdService

    service = KvdService(cast("Any", object()), facts={}, request_shutdown=lambda: None)
    assert absent(set(service.methods), text_of("docs/protocol.md")) == []


def test_every_result_field_and_stream_event_is_documented() -> None:
    """What a client reads out of a result or a stream, in docs/protocol.md."""
    from kvd_client import results, stream

    classes = [
        each
        for module in (results, stream)
        for _, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__ and hasattr(each, "__dataclass_fields__")
    ]
    words = {field.name for each in classes for field in fields(each)} - {"server"}
    events = {each.type for each in classes if isinstance(getattr(each, "type", None), str)}
    assert len(events) > 3
    assert absent(words | events, text_of("docs/protocol.md")) == []


def test_every_figure_of_the_statistics_is_documented() -> None:
    """Each key of `stats --json`."""
    from kvd.scheduler import views

    tree = ast.parse(inspect.getsource(views.statistics))
    keys = {
        str(key.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    }
    assert "budget_bytes" in keys
    assert absent(keys, text_of()) == []


def test_every_page_format_is_documented() -> None:
    """The names `--kv-format` takes."""
    from kvd.quant.spec import NAMED_FORMATS

    assert absent({"auto", *NAMED_FORMATS}, text_of()) == []


def test_every_make_target_is_documented() -> None:
    """`make demo`, `make test` and the others of the Makefile's own list."""
    targets = re.findall(r'@echo "make ([\w-]+)', (ROOT / "Makefile").read_text())
    assert {"demo", "test", "check", "bench", "clean"} <= set(targets)
    assert absent({f"make {target}" for target in targets}, text_of()) == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links and pictures of a page exist."""
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)\s#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
