"""Completion in shells: the script that a shell reads, and agents' names from a running daemon.

The script is click's own. It runs the command with a variable set at each press of the key, so what is completed must
be quick and must not fail: no daemon, or one that does not answer within `PATIENCE_S`, means no names. Nothing here
prints an error, since that would land in the middle of what somebody types.

`kvd` and `kvd-client` both use it. May import click, kvd_client (inside functions) and the standard library.
"""

from __future__ import annotations

import re
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS: Final = ("bash", "zsh", "fish")
PATIENCE_S: Final = 0.5
"""How long a daemon has for its answer: somebody waits with a finger on the key."""

MOST_NAMES: Final = 200
_PLAIN = re.compile(r"[\w.@%+=,:/-]+")
"""Names that no shell reads as anything else; others would need quotes that differ from shell to shell."""


def complete_agents(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of agents that begin so, of the namespace in which the command acts: the client's own when none is said.

    Those of the gateway come only when their beginning is there.
    """
    from kvd_client.cli_common import environment
    from kvd_client.client import Client
    from kvd_client.errors import KvdClientError
    from kvd_client.paths import resolve_socket

    try:
        socket = resolve_socket(_given(ctx, "socket"), _given(ctx, "data_dir"), environment(_given(ctx, "config")))
        with Client(socket, timeout_s=PATIENCE_S) as client:
            found = client.agents(_given(ctx, "namespace") or client.namespace)
    except (KvdClientError, OSError, ValueError):
        return []
    names = sorted({agent.agent for agent in found if agent.agent.startswith(incomplete)})
    offered = [name for name in names if _PLAIN.fullmatch(name) and (incomplete or not name.startswith("gw:"))]
    return [CompletionItem(name) for name in offered[:MOST_NAMES]]


def _given(ctx: click.Context, name: str) -> Any:  # noqa: ANN401  (whatever the option takes)
    """A shared option, from the nearest place that has it."""
    at: click.Context | None = ctx
    while at is not None:
        if at.params.get(name) is not None:
            return at.params[name]
        at = at.parent
    return None


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> None:
    """Print the script that completes this program's commands, options and names in a shell.

    For bash (4.4 or later): eval "$(PROGRAM completion bash)" in ~/.bashrc; for zsh the same with zsh in ~/.zshrc; for
    fish: PROGRAM completion fish > ~/.config/fish/completions/PROGRAM.fish. PROGRAM is kvd or kvd-client: each has a
    script of its own.
    """
    root = ctx.find_root()
    program = root.info_name or "kvd"
    variable = f"_{program}_COMPLETE".replace("-", "_").upper()
    kind = get_completion_class(shell)
    assert kind is not None  # click has all of SHELLS
    click.echo(kind(root.command, {}, program, variable).source())


__all__ = ["MOST_NAMES", "PATIENCE_S", "SHELLS", "complete_agents", "completion"]
