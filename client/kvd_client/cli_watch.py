"""Commands that look on: `top` and `events`."""

from __future__ import annotations

import os
import sys

import click

from kvd_client.cli_common import (
    EXIT_INTERRUPTED,
    Session,
    columns,
    is_terminal,
    print_json,
    print_lines,
    with_session,
)
from kvd_client.cli_completion import complete_agents
from kvd_client.client import Client
from kvd_client.event_text import event_line
from kvd_client.events import EVENT_KINDS

SNAPSHOT_COLUMNS = 120
"""Width of a snapshot where no terminal says one."""


@click.command()
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(EVENT_KINDS),
    metavar="KIND",
    multiple=True,
    help=f"Show this kind alone; may be given several times: {', '.join(EVENT_KINDS)}.",
)
@click.option(
    "--agent", shell_complete=complete_agents, help="Show this agent (of --namespace), and the daemon as a whole."
)
@click.option(
    "--since",
    type=click.IntRange(0),
    metavar="N",
    help="Begin after event number N, as far as it is remembered; 0 for all that is [default: now].",
)
@with_session
def events(session: Session, /, kinds: tuple[str, ...], agent: str | None, since: int | None) -> None:
    """Follow what happens: evictions, faults, misses with their reasons, turns, disk, limits.

    One line an event, with --json one object a line. Goes on when the daemon is started anew, and says so; ends with
    Ctrl-C.

    Example: kvd-client events --kind miss --kind eviction
    """
    try:
        with session.client.subscribe(
            kinds=kinds or None, agent=agent, namespace=session.namespace, since=since, reconnect=True
        ) as subscription:
            for event in subscription:
                if session.json:
                    print_json(event.to_map())
                else:
                    print_lines([event_line(event)])
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None  # the way to end it: nothing to report


@click.command()
@click.option("--once", is_flag=True, help="Print one snapshot of all agents and end; so does --json.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 60),
    default=0.5,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@with_session
def top(session: Session, /, once: bool, interval_s: float) -> None:
    """Watch agents, pages, budget, swap traffic and requests, live.

    Keys: q quits, up and down select an agent, p pins or unpins it, e evicts it, s sorts by the next column, r reverses
    the order, h shows help. Where input or output is no terminal, one snapshot is printed.

    Example: kvd-client top --namespace work
    """
    if session.json:
        print_json(session.client.monitor(namespace=session.namespace))
        return
    colour = is_terminal() and "NO_COLOR" not in os.environ
    from kvd_client.top import Top, snapshot

    if once or not (is_terminal() and sys.stdin.isatty()):
        width = columns() or SNAPSHOT_COLUMNS
        print_lines(snapshot(session.client, session.namespace, columns=width, colour=colour))
        return
    from kvd_client.top_screen import Terminated

    def make_client(timeout_s: float | None) -> Client:
        return Client(session.client.socket, timeout_s=timeout_s)

    try:
        Top(make_client, session.namespace, interval_s, colour=colour).run(sys.stdin.fileno(), sys.stdout.fileno())
    except Terminated as ended:
        raise SystemExit(128 + ended.signum) from None
