"""The configuration file behind every command's options, and `kvd config`, which says where each value came from.

Theory of operation. Options have three sources: flag, environment, file, the strongest first, and a default. Click
knows the first two; the file becomes what it calls a default map, so that a value of the file is read by the option's
own type and the command never knows. The file is checked as a whole before any command runs: a name that nothing takes
and a value that its option refuses are errors that name file and key, not settings that silently do nothing.

At the top of the file stand the options that many commands share (`SHARED`); a table for a command holds its others.
May import click, kvd.cli_types, kvd.config, kvd.errors, kvd.model.paths, kvd_client.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from kvd.cli_types import ShareType, SizeType, WriteLimit
from kvd.config import ConfigError
from kvd.errors import KvdError
from kvd.ops.sizes import format_size, parse_size
from kvd_client.cli_lazy import loaded
from kvd_client.config_file import (
    ConfigFileError,
    config_file,
    default_config_file,
    path_setting,
    read_config_file,
)
from kvd_client.paths import default_data_dir, default_socket

SHARED: Final = {"data_dir": "data_dir", "socket": "socket", "model": "model_name", "model_dir": "model_dir"}
"""Names at the top of the file, and what click calls the options that take them, in whichever command."""

TABLES: Final = ("serve", "gateway")
"""Commands that have a table."""

ACTIONS: Final = ("as_json", "list_identities", "list_rules")
"""Options that say what a command is to do once, and are no settings."""

_FILE = "kvd.config_file"
_FOLLOWED = "kvd.followed_file"
_SHARED_VALUES = "kvd.shared_values"


def read_defaults(root: click.Group, ctx: click.Context, path: Path) -> dict[str, Any]:
    """The file as click's default map of the root command.

    Args:
        root: the `kvd` command.
        ctx: of it.
        path: the file.

    Raises:
        ConfigError: it cannot be read, or has a name or value that nothing takes; the message names what is allowed.
    """
    try:
        found = read_config_file(path)
        for name in ("data_dir", "socket"):
            path_setting(path, name, found.get(name))
    except ConfigFileError as error:
        raise ConfigError(str(error), setting="config") from error
    tables: dict[str, Mapping[str, Any]] = {}
    shared: dict[str, Any] = {}
    for key, value in found.items():
        if key in TABLES and isinstance(value, dict):
            tables[key] = value
        elif _spelled(key) in SHARED:
            shared[SHARED[_spelled(key)]] = value
        else:
            raise _unknown(path, "", key, (*SHARED, *(f"[{table}]" for table in TABLES)))
    shared = _checked(root, ctx, path, "serve", shared, "")
    ctx.meta[_SHARED_VALUES] = shared
    defaults: dict[str, Any] = {table: dict(shared) for table in TABLES}
    for table, values in tables.items():
        options = options_of(command_of(root, table))
        given = {}
        for key, value in values.items():
            if _spelled(key) not in options:
                raise _unknown(path, f"[{table}] ", key, tuple(options))
            given[options[_spelled(key)].name or ""] = value
        defaults[table] |= _checked(root, ctx, path, table, given, f"[{table}] ")
    return defaults


def add_defaults(ctx: click.Context, name: str, command: click.Command) -> None:
    """Put what the file says of shared settings behind a command that has no table.

    Done for the command that is run alone: all of them would have to be imported.
    """
    assert ctx.default_map is not None
    if name not in ctx.default_map:
        ctx.default_map[name] = _map_of(command, ctx.meta.get(_SHARED_VALUES, {}))


def command_of(root: click.Group, name: str) -> click.Command:
    """A command of `kvd`, imported."""
    return loaded(root.commands[name])


def options_of(command: click.Command) -> dict[str, click.Option]:
    """A command's settings by the name they have in the file."""
    options = {}
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden and param.name not in ACTIONS:
            longest = max(param.opts, key=len)
            options[_spelled(longest.lstrip("-"))] = param
    return options


def _spelled(key: str) -> str:
    return key.replace("-", "_")


def _map_of(command: click.Command, shared: Mapping[str, Any]) -> dict[str, Any]:
    """What is shared, for a command and the commands below it."""
    below = command.commands if isinstance(command, click.Group) else {}
    return dict(shared) | {name: _map_of(inner, shared) for name, inner in below.items()}


def _checked(
    root: click.Group, ctx: click.Context, path: Path, command: str, values: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The values, each tried on its option; click reads them again later."""
    real = command_of(root, command)
    inner = click.Context(real, parent=ctx, info_name=command)
    by_name = {param.name: param for param in real.params}
    for name, value in values.items():
        param = by_name[name]
        key = next(key for key, each in options_of(real).items() if each is param)
        if value is None or isinstance(value, dict) or (isinstance(value, list) and not param.multiple):
            raise ConfigError(f"{path}: {where}{key} takes one value, not {value!r}", setting=key)
        try:
            param.type_cast_value(inner, value)
        except click.UsageError as error:
            raise ConfigError(f"{path}: {where}{key}: {error.message}", setting=key) from error
    return dict(values)


def _unknown(path: Path, where: str, key: str, allowed: tuple[str, ...]) -> ConfigError:
    near = difflib.get_close_matches(_spelled(key), allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return ConfigError(f"{path}: {where}{key} is no setting{hint} Allowed: {', '.join(sorted(allowed))}", setting=key)


def use_file(ctx: click.Context, _param: click.Parameter, value: str | None) -> Path | None:
    """Callback of `--config`: read the file and make it the default of all that follows."""
    path = config_file(value)
    ctx.meta[_FILE] = path
    is_named = value is not None or "KVD_CONFIG" in os.environ
    ctx.meta[_FOLLOWED] = path if path is not None or is_named else default_config_file()
    if path is not None and not ctx.resilient_parsing:
        assert isinstance(ctx.command, click.Group)
        try:
            ctx.default_map = read_defaults(ctx.command, ctx, path)
        except KvdError as error:
            click.echo(f"kvd: {error.message}", err=True)
            ctx.exit(2)
    return path


def reread(ctx: click.Context, path: Path) -> click.Context:
    """A running command's context, with its parameters as a file makes them now; flags and variables as they were.

    Raises:
        ConfigError: as `read_defaults`.
    """
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    fresh = click.Context(root.command, default_map=read_defaults(root.command, root, path))
    fresh.meta[_FILE] = path
    try:
        inner = ctx.command.make_context(ctx.info_name or "", [], parent=fresh)
    except click.UsageError as error:
        raise ConfigError(f"{path}: {error.format_message()}", setting="config") from error
    for name, value in ctx.params.items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            inner.params[name] = value
            inner.set_parameter_source(name, ParameterSource.COMMANDLINE)
    return inner


def came_from_file(ctx: click.Context, name: str) -> bool:
    """Whether an option of a running command has the file's value."""
    return ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP


def place_in_file(ctx: click.Context, setting: str) -> str:
    """File, table and key of a running command's setting, to begin an error with; empty when the file did not say it.

    Args:
        ctx: of the command.
        setting: the option's name, - or _ in it.
    """
    key = _spelled(setting)
    option = options_of(ctx.command).get(key)
    if option is None or not came_from_file(ctx, option.name or ""):
        return ""
    return f"{config_path(ctx)}: {'' if key in SHARED else f'[{ctx.command.name}] '}{key}: "


def followed_path(ctx: click.Context) -> Path | None:
    """The file that a running command follows: the one it read, or the default one, which may come; None: none."""
    found: Path | None = ctx.meta.get(_FOLLOWED)
    return found


def config_path(ctx: click.Context) -> Path | None:
    """The file that this run of `kvd` read, or None."""
    found: Path | None = ctx.meta.get(_FILE)
    return found


def shared_setting(ctx: click.Context, name: str, value: Path | None) -> Path | None:
    """The value of a running command's option if it was named on the spot, by flag or variable."""
    return None if value is None or came_from_file(ctx, name) else value


@click.group("config")
def config() -> None:
    """What is set, and by what: flags, then environment, then the file, then defaults."""


@config.command("path")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: the file, and whether it is read.")
@click.pass_context
def path_command(ctx: click.Context, as_json: bool) -> None:
    """Print the file that is read, or would be if it existed.

    Example: ${EDITOR:-vi} "$(kvd config path)"
    """
    used = config_path(ctx)
    file = str(used or default_config_file())
    click.echo(json.dumps({"file": file, "read": used is not None}) if as_json else file)


@config.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def show(ctx: click.Context, as_json: bool) -> None:
    """Print every setting that `kvd serve` and `kvd gateway` would take now, and where its value came from.

    Values are written as the file and the options take them, a folder with ~ as the path that it means; `-` is a
    setting without a value. --json has sizes in bytes and percentages as parts of 1.

    Example: kvd config show --json
    """
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    used = config_path(ctx)
    rows = {table: list(_settings(root, command_of(root.command, table), table)) for table in TABLES}
    if as_json:
        facts = {
            table: {name: {"value": _plain(value), "source": source} for name, value, source, _ in found}
            for table, found in rows.items()
        }
        click.echo(json.dumps({"file": None if used is None else str(used), **facts}))
        return
    click.echo(f"file: {used}" if used else f"file: none ({default_config_file()} does not exist)")
    for table, found in rows.items():
        click.echo(f"[{table}]")
        lines = [(name, _shown(value, param.type), source) for name, value, source, param in found]
        first, second = (max(len(line[at]) for line in lines) for at in (0, 1))
        for name, value, source in lines:
            click.echo(f"  {name:{first}}  {value:{second}}  {source}")


def _settings(root: click.Context, command: click.Command, table: str) -> Iterator[tuple[str, Any, str, click.Option]]:
    """Name, value, source and option of each setting of a command that gets no flags."""
    try:
        inner = command.make_context(table, [], parent=root)
    except click.UsageError as error:  # an environment variable that the option refuses
        click.echo(f"kvd: {error.format_message()}", err=True)
        sys.exit(2)
    values: dict[str, Any] = {}
    for name, param in options_of(command).items():
        assert param.name is not None
        values[name] = inner.params[param.name]
        match inner.get_parameter_source(param.name):
            case ParameterSource.ENVIRONMENT:
                source = f"environment {param.envvar}"
            case ParameterSource.DEFAULT_MAP:
                source = f"file {root.meta.get(_FILE)}"
            case _:
                source = "default"
        yield name, _effective(name, values[name], values), source, param


def _effective(name: str, value: object, before: Mapping[str, Any]) -> object:
    """What a setting that was left open comes to."""
    from kvd.model.paths import model_dir

    if value is not None:
        return value
    match name:
        case "data_dir":
            return default_data_dir()
        case "socket":
            return default_socket(before.get("data_dir"))
        case "model_dir":
            return model_dir(None)
    return None


def _plain(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _shown(value: object, kind: object) -> str:
    """A value as its option, of the type `kind`, takes it."""
    if isinstance(kind, WriteLimit):
        return f"{_size(value)}/min" if isinstance(value, int) else "off"
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple | list):
        return ", ".join(f"{each[0]}={_size(each[1])}" if isinstance(each, tuple) else str(each) for each in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(kind, ShareType) and isinstance(value, float):
        return f"{100 * value:.12g}%"
    if isinstance(kind, SizeType | ShareType) and isinstance(value, int):
        return _size(value)
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else str(value)


def _size(size_bytes: int) -> str:
    """A size without loss: `10.2GB`, `8MiB`, or plain bytes where neither is exact."""
    decimal = format_size(size_bytes).replace(" ", "")
    if parse_size(decimal) == size_bytes:
        return decimal
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}"
    return str(size_bytes)


__all__ = [
    "SHARED",
    "TABLES",
    "add_defaults",
    "came_from_file",
    "command_of",
    "config",
    "config_path",
    "followed_path",
    "options_of",
    "place_in_file",
    "read_defaults",
    "reread",
    "shared_setting",
    "use_file",
]
