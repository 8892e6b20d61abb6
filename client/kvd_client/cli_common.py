"""What all commands share: the options that find the daemon, exit codes, and printing.

The client itself is imported when a command runs: `--help` and completion do without.
"""

from __future__ import annotations

import json
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

EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 2, 3, 130

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Defaults:
    """The shared options as given before the command's name."""

    data_dir: str | None = None
    socket: str | None = None
    namespace: str | None = None
    json: bool = False

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Defaults:
        """From click's parameters."""
        text = {key: str(given[key]) for key in ("data_dir", "socket", "namespace") if given.get(key) is not None}
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
    """Add --data-dir, --socket, --namespace and --json, which may stand before or after the command's name."""
    options: tuple[Callable[[F], F], ...] = (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--namespace", metavar="NAME", help="Sharing domain of the agents [default: default]."),
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
        for key in ("data_dir", "socket", "namespace", "as_json"):
            given.pop(key)
        here = bool(inner.socket or inner.data_dir)  # what stands nearer to the command wins as a whole
        where = inner if here else outer
        namespace = inner.namespace or outer.namespace
        socket = resolve_socket(where.socket, where.data_dir)
        with Client(socket, namespace=namespace or "default") as client:
            session = Session(client, namespace, inner.json or outer.json)
            context.meta[_JSON_ASKED] = session.json
            command(session, **given)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    return shared_options(run)


class ErrorExits(LazyGroup):
    """A group whose commands end with the documented exit codes and one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  (click's signature)
        """Run the command."""
        from kvd_client.errors import DaemonUnreachable, KvdClientError

        try:
            return super().invoke(ctx)
        except DaemonUnreachable as error:
            report(error.message)
            ctx.exit(EXIT_UNREACHABLE)
        except KvdClientError as error:
            report(describe(error, for_programs=ctx.meta.get(_JSON_ASKED, False)))
            ctx.exit(EXIT_FAILED)
        except KeyboardInterrupt:
            report("interrupted; the call was cancelled")
            ctx.exit(EXIT_INTERRUPTED)


def report(message: str) -> None:
    """One line on stderr."""
    click.echo(f"kvd-client: {message}", err=True)


def describe(error: KvdClientError, *, for_programs: bool) -> str:
    """One line: the message and when to try again; with --json also the error's name and facts."""
    from kvd_client.errors import RemoteError

    if not isinstance(error, RemoteError):
        return error.message
    retry = "" if error.retry_after_s is None else f"; try again in {error.retry_after_s:g} s"
    if not for_programs:
        return error.message + retry
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
