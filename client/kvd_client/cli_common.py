"""What all commands share: the options that find the daemon, exit codes, and printing.

The client itself is imported when a command runs: `--help` and completion do without.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvd_client.cli_lazy import LazyGroup

if TYPE_CHECKING:
    from kvd_client.client import Client
    from kvd_client.errors import KvdClientError

_JSON_ASKED = "kvd_client.json"
"""Key of click's shared `meta`: the command was asked for JSON, so its error line has every fact."""

_COMMAND = "kvd_client.command"
"""Key of the command that runs: its options are what an error line calls the protocol's parameters."""

EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 2, 3, 130

F = TypeVar("F", bound=Callable[..., Any])


_TEXTS = ("config", "data_dir", "socket", "namespace")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The shared options as given before the command's name."""

    config: str | None = None
    data_dir: str | None = None
    socket: str | None = None
    namespace: str | None = None
    json: bool = False

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Defaults:
        """From click's parameters."""
        text = {key: str(given[key]) for key in _TEXTS if given.get(key) is not None}
        return cls(**text, json=bool(given.get("as_json")))


@dataclass(frozen=True, slots=True)
class Session:
    """The shared options in effect for one command.

    Attributes:
        client: not yet connected.
        namespace: as asked for, None when nothing was said.
        json: print JSON.
    """

    client: Client
    namespace: str | None
    json: bool


def shared_options(command: F) -> F:
    """Add the options that find the daemon, --namespace and --json; they may stand before or after the command."""
    options: tuple[Callable[[F], F], ...] = (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--namespace", metavar="NAME", help="Sharing domain of the agents [default: default]."),
        click.option(
            "--config",
            metavar="FILE",
            help="Configuration file that says where the daemon is, where nothing else does; an empty name means none "
            "[env: KVD_CONFIG; default: kvd.toml in the user's configuration folder, if there].",
        ),
        click.option(
            "--socket",
            metavar="PATH",
            help="The daemon's socket [env: KVD_SOCKET; default: kvd.sock in the data folder].",
        ),
        click.option(
            "--data-dir",
            metavar="DIR",
            help="The daemon's data folder, which holds its socket "
            "[env: KVD_DATA_DIR; default: kvd in the user's data folder].",
        ),
    )
    for option in options:
        command = option(command)
    return command


def with_session(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the shared options and, as its first argument, the `Session` they make."""

    @click.pass_context
    def run(context: click.Context, /, **given: Any) -> None:  # noqa: ANN401  (click's parameters)
        from kvd_client.client import Client
        from kvd_client.paths import resolve_socket

        outer = context.obj if isinstance(context.obj, Defaults) else Defaults()
        inner = Defaults.of(given)
        for key in (*_TEXTS, "as_json"):
            given.pop(key)
        here = bool(inner.socket or inner.data_dir)  # what stands nearer to the command wins as a whole
        where = inner if here else outer
        namespace = inner.namespace or outer.namespace
        config = outer.config if inner.config is None else inner.config
        socket = resolve_socket(where.socket, where.data_dir, environment(config))
        with Client(socket, namespace=namespace or "default") as client:
            session = Session(client, namespace, inner.json or outer.json)
            context.meta[_JSON_ASKED] = session.json
            context.meta[_COMMAND] = context.command
            command(session, **given)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    return shared_options(run)


class ErrorExits(LazyGroup):
    """A group whose commands end with the documented exit codes and one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  (click's signature)
        """Run the command."""
        from kvd_client.config_file import ConfigFileError
        from kvd_client.errors import DaemonUnreachable, InvalidParams, InvalidText, KvdClientError

        try:
            return super().invoke(ctx)
        except DaemonUnreachable as error:
            report(error.message)
            ctx.exit(EXIT_UNREACHABLE)
        except KvdClientError as error:
            command = ctx.meta.get(_COMMAND)
            report(describe(error, for_programs=ctx.meta.get(_JSON_ASKED, False), command=command))
            # the daemon knows ranges that no option states, such as what a size or a name may be
            wrong_usage = isinstance(error, InvalidParams | InvalidText | ConfigFileError)
            ctx.exit(EXIT_USAGE if wrong_usage else EXIT_FAILED)
        except KeyboardInterrupt:
            report("interrupted; the call was cancelled")
            ctx.exit(EXIT_INTERRUPTED)


def environment(config: str | None) -> Mapping[str, str]:
    """The environment in which the daemon is looked for: a file that was named on the spot replaces KVD_CONFIG."""
    return os.environ if config is None else {**os.environ, "KVD_CONFIG": config}


def report(message: str) -> None:
    """One line on stderr."""
    click.echo(f"kvd-client: {message}", err=True)


def describe(error: KvdClientError, *, for_programs: bool, command: click.Command | None = None) -> str:
    """One line: the message and when to try again; with --json also the error's name and facts.

    People read the options of `command` where the message names parameters of the protocol; programs read the message.
    """
    from kvd_client.cli_words import command_words
    from kvd_client.errors import RemoteError

    if not isinstance(error, RemoteError):
        return error.message
    retry = "" if error.retry_after_s is None else f"; try again in {error.retry_after_s:g} s"
    if not for_programs:
        return command_words(error, command) + retry
    facts = ", ".join(f"{key}={value}" for key, value in error.data.items())
    return f"{error.name}: {error.message}{f' ({facts})' if facts else ''}{retry}"


def write_text(text: str) -> None:
    """Write text to stdout as UTF-8, nothing added, whatever the locale."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def print_json(value: object) -> None:
    """Write one JSON value and a line end to stdout."""
    write_text(json.dumps(value, ensure_ascii=False, default=_as_text) + "\n")


def _as_text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def print_facts(session: Session, facts: Mapping[str, object]) -> None:
    """Print a map: as JSON, or a line for each entry."""
    if session.json:
        print_json(facts)
    else:
        from kvd_client.cli_show import fact_lines

        print_lines(fact_lines(facts, columns=columns()))


def print_lines(lines: list[str]) -> None:
    """Write lines to stdout."""
    write_text("".join(f"{line}\n" for line in lines))


def columns() -> int | None:
    """Width of the terminal that stdout is; None elsewhere, where lines are not broken."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()
