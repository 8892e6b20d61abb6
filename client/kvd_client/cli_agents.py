"""Commands about agents and the daemon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from kvd_client.cli_common import (
    EXIT_FAILED,
    Session,
    columns,
    print_facts,
    print_json,
    print_lines,
    with_session,
)
from kvd_client.cli_completion import complete_agents
from kvd_client.cli_show import agent_line, agent_table, limit_lines, size
from kvd_client.residency import agent_map_lines, residency_lines
from kvd_client.results import AgentInfo, ExportResult, Health, Limits, Statistics


def _flat(result: AgentInfo | ExportResult | Health | Limits | Statistics) -> dict[str, Any]:
    """A result as one map, the fields that only the daemon knows included."""
    known = asdict(result)
    rest: dict[str, Any] = known.pop("server")
    return {**known, **rest}


def _done(session: Session, done: str, agent: AgentInfo) -> None:
    """Say what was done to an agent: its facts as JSON, or one line."""
    if session.json:
        print_json(_flat(agent))
    else:
        print_lines([agent_line(done, _flat(agent))])


def _quota(text: str, option: str = "--namespace-quota") -> tuple[str, str | None]:
    name, equals, size = text.rpartition("=")
    if not (name and equals and size):
        raise click.BadParameter(f"{text!r} must be NAME=SIZE, such as work=4GB, or NAME=none", param_hint=option)
    return name, None if size == "none" else size


def _budget_line(residency: Mapping[str, Any]) -> list[str]:
    if not {"resident_bytes", "budget_bytes"} <= residency.keys():
        return []
    return ["", f"{size(residency['resident_bytes'])} in RAM, of a budget of {size(residency['budget_bytes'])}"]


@click.command()
@with_session
def agents(session: Session, /) -> None:
    """List the agents, of all namespaces or of --namespace.

    `in RAM` are the bytes of the agent's pages, `on disk` its pages that are nowhere else.

    Example: kvd-client agents --json
    """
    rows = [_flat(agent) for agent in session.client.agents(session.namespace)]
    if session.json:
        print_json(rows)
        return
    several = session.namespace is not None or len({row["namespace"] for row in rows}) > 1
    print_lines(agent_table(rows, namespaces=several))


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@with_session
def show(session: Session, /, agent: str) -> None:
    """Show everything about AGENT.

    Example: kvd-client show alice
    """
    print_facts(session, _flat(session.client.agent_info(agent)))


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@click.argument("new_agent")
@click.option("--tokens", type=click.IntRange(0), help="Share only the first tokens [default: all].")
@with_session
def fork(session: Session, /, agent: str, new_agent: str, tokens: int | None) -> None:
    """Make NEW_AGENT from AGENT; they share their pages until they differ.

    Example: kvd-client fork alice bob --tokens 512
    """
    _done(session, f"{new_agent} forked from {agent}", session.client.fork(agent, new_agent, tokens))


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@click.argument("tokens", type=click.IntRange(0))
@with_session
def rollback(session: Session, /, agent: str, tokens: int) -> None:
    """Cut AGENT to its first TOKENS tokens.

    Example: kvd-client rollback alice 512
    """
    _done(session, f"{agent} cut", session.client.rollback(agent, tokens))


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@with_session
def pin(session: Session, /, agent: str) -> None:
    """Load AGENT's pages and keep them in RAM.

    Example: kvd-client pin alice
    """
    _done(session, f"{agent} pinned", session.client.pin(agent))


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@with_session
def unpin(session: Session, /, agent: str) -> None:
    """Let AGENT's pages be evicted again.

    Example: kvd-client unpin alice
    """
    _done(session, f"{agent} unpinned", session.client.unpin(agent))


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@with_session
def verify(session: Session, /, agent: str) -> None:
    """Read and verify every page file of AGENT; bad ones are written anew from clean copies in RAM.

    Example: kvd-client verify alice
    """
    info = session.client.verify(agent)
    counts = ("checked", "rewritten", "bad", "unread")
    words = ", ".join(f"{info.server.get(f'{name}_pages', 0)} {name}" for name in counts)
    _done(session, f"{agent} verified (pages: {words})", info)


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@with_session
def prefetch(session: Session, /, agent: str) -> None:
    """Load AGENT's pages while there is room, as a hint before a call.

    Example: kvd-client prefetch alice
    """
    _done(session, f"{agent} prefetched", session.client.prefetch(agent))


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@with_session
def evict(session: Session, /, agent: str) -> None:
    """Write AGENT's pages to disk and free their RAM.

    Example: kvd-client evict alice
    """
    _done(session, f"{agent} evicted", session.client.evict(agent))


@click.command()
@click.argument("agent", shell_complete=complete_agents)
@with_session
def rm(session: Session, /, agent: str) -> None:
    """Forget AGENT, in RAM and on disk.

    Example: kvd-client rm alice
    """
    session.client.delete(agent)
    if session.json:
        print_json({"agent": agent, "deleted": True})
    else:
        print_lines([f"{agent} deleted"])


@click.command("export")
@click.argument("agent", shell_complete=complete_agents)
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@with_session
def export_command(session: Session, /, agent: str, file: str, force: bool) -> None:
    """Write AGENT's present state, text and KV, to FILE, for another daemon of the same model.

    The daemon writes FILE (0600), on its machine.

    Example: kvd-client export alice alice.safetensors
    """
    result = session.client.export_agent(agent, file, force=force)
    if session.json:
        print_json(_flat(result))
        return
    lines = [f"{agent} exported to {result.path}: {result.tokens} tokens, {size(result.file_bytes)}"]
    print_lines(lines + ([result.lost_reason] if result.lost_reason else []))


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--as", "agent", metavar="NAME", help="Name of the agent [default: the one in FILE].")
@click.option("--replace", is_flag=True, help="Overwrite an agent of that name.")
@with_session
def import_command(session: Session, /, file: str, agent: str | None, replace: bool) -> None:
    """Make an agent from FILE, which `kvd-client export` wrote; it continues at its exact token.

    Its namespace is the one in FILE unless --namespace says otherwise. The daemon reads FILE, on its machine.

    Example: kvd-client import alice.safetensors --as bob
    """
    imported = session.client.import_agent(file, agent=agent, namespace=session.namespace, replace=replace)
    _done(session, f"{imported.agent} imported", imported)


@click.command()
@click.argument("agent", required=False, shell_complete=complete_agents)
@with_session
def residency(session: Session, /, agent: str | None) -> None:
    """Show which pages are in RAM, on disk or under way, of AGENT or of all agents.

    Of all agents one line a branch: an agent whose text turned out differently leaves its old branch behind, and may
    share its pages. Of AGENT a map of each branch and each group of layers: which pages are in RAM, swapped out,
    shared, pinned, and behind the window that its layers see.

    Example: kvd-client residency alice --json
    """
    result = session.client.residency(agent)
    if session.json:
        print_json(result)
        return
    lines = residency_lines if agent is None else agent_map_lines
    print_lines([*lines(result, columns=columns()), *_budget_line(result)])


@click.command()
@with_session
def stats(session: Session, /) -> None:
    """Print the daemon's figures since its start.

    Example: kvd-client stats --json
    """
    print_facts(session, _flat(session.client.statistics()))


@click.command()
@click.argument("size", required=False)
@click.option(
    "--namespace-quota",
    "quotas",
    metavar="NAME=SIZE",
    multiple=True,
    help="Set what pages of a namespace's agents should take of it at most; NAME=none for any.",
)
@click.option(
    "--namespace-disk-quota",
    "disk_quotas",
    metavar="NAME=SIZE",
    multiple=True,
    help="Set what files of a namespace's agents may take of the disk; NAME=none for any.",
)
@with_session
def budget(session: Session, /, size: str | None, quotas: tuple[str, ...], disk_quotas: tuple[str, ...]) -> None:
    """Show the memory budget and what it bounds, or set it to SIZE until the daemon's next start.

    A smaller budget takes pages from idle agents at once (they are on disk), lets running requests make way for each
    other, and ends those that can never fit any more. SIZE is written as for `kvd serve --budget`, which sets it for
    good.

    Example: kvd-client budget 4GB
    """
    wanted = dict(_quota(each) for each in quotas)
    on_disk = dict(_quota(each, "--namespace-disk-quota") for each in disk_quotas)
    limits = _flat(
        session.client.configure(budget=size, namespace_quotas=wanted or None, namespace_disk_quotas=on_disk or None)
    )
    if session.json:
        print_json(limits)
    else:
        print_lines(limit_lines(limits))


@click.command()
@with_session
def health(session: Session, /) -> None:
    """Say whether the daemon can generate now; exit code 0 only then.

    Example: kvd-client health && echo ready
    """
    result = session.client.health()
    print_facts(session, _flat(result))
    if not result.ready:
        raise SystemExit(EXIT_FAILED)


@click.command()
@with_session
def model(session: Session, /) -> None:
    """Describe the model that the daemon has loaded.

    Example: kvd-client model --json
    """
    print_facts(session, session.client.model_info())


@click.command()
@with_session
def drain(session: Session, /) -> None:
    """Let the daemon finish what runs and take no new work until it is started again.

    There is no way back: it goes on running and refuses all work, until `kvd-client shutdown` and `kvd serve`. What it
    knows can be looked at meanwhile.

    Example: kvd-client drain
    """
    print_facts(session, session.client.drain())


@click.command()
@with_session
def shutdown(session: Session, /) -> None:
    """Stop the daemon; what is committed stays.

    Example: kvd-client shutdown
    """
    print_facts(session, session.client.shutdown())
