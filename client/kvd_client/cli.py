"""`kvd-client`: the commands. What they share is in `cli_common`; each is imported when it is run (`cli_lazy`)."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Final, NoReturn

import click

from kvd_client import __version__
from kvd_client.cli_common import EXIT_INTERRUPTED, Defaults, ErrorExits, shared_options

COMMANDS: Final = {
    "agents": ("kvd_client.cli_agents:agents", "List the agents, of all namespaces or of --namespace."),
    "budget": (
        "kvd_client.cli_agents:budget",
        "Show the memory budget and what it bounds, or set it to SIZE until the daemon's next start.",
    ),
    "chat": ("kvd_client.cli_text:chat", "Answer the last message of AGENT's conversation."),
    "completion": (
        "kvd_client.cli_completion:completion",
        "Print the script that completes this program's commands, options and names in a shell.",
    ),
    "drain": (
        "kvd_client.cli_agents:drain",
        "Let the daemon finish what runs and take no new work until it is started again.",
    ),
    "events": (
        "kvd_client.cli_watch:events",
        "Follow what happens: evictions, faults, misses with their reasons, turns, disk, limits.",
    ),
    "evict": ("kvd_client.cli_agents:evict", "Write AGENT's pages to disk and free their RAM."),
    "export": (
        "kvd_client.cli_agents:export_command",
        "Write AGENT's present state, text and KV, to FILE, for another daemon of the same model.",
    ),
    "fork": ("kvd_client.cli_agents:fork", "Make NEW_AGENT from AGENT; they share their pages until they differ."),
    "generate": ("kvd_client.cli_text:generate", "Continue AGENT's text."),
    "health": ("kvd_client.cli_agents:health", "Say whether the daemon can generate now; exit code 0 only then."),
    "import": (
        "kvd_client.cli_agents:import_command",
        "Make an agent from FILE, which `kvd-client export` wrote; it continues at its exact token.",
    ),
    "inject": (
        "kvd_client.cli_text:inject",
        "Append text, or messages, to each AGENT and compute it without generating.",
    ),
    "model": ("kvd_client.cli_agents:model", "Describe the model that the daemon has loaded."),
    "pin": ("kvd_client.cli_agents:pin", "Load AGENT's pages and keep them in RAM."),
    "prefetch": ("kvd_client.cli_agents:prefetch", "Load AGENT's pages while there is room, as a hint before a call."),
    "residency": (
        "kvd_client.cli_agents:residency",
        "Show which pages are in RAM, on disk or under way, of AGENT or of all agents.",
    ),
    "rm": ("kvd_client.cli_agents:rm", "Forget AGENT, in RAM and on disk."),
    "rollback": ("kvd_client.cli_agents:rollback", "Cut AGENT to its first TOKENS tokens."),
    "show": ("kvd_client.cli_agents:show", "Show everything about AGENT."),
    "shutdown": ("kvd_client.cli_agents:shutdown", "Stop the daemon; what is committed stays."),
    "stats": ("kvd_client.cli_agents:stats", "Print the daemon's figures since its start."),
    "tokenize": ("kvd_client.cli_text:tokenize", "Print the model's token ids of a text."),
    "top": ("kvd_client.cli_watch:top", "Watch agents, pages, budget, swap traffic and requests, live."),
    "unpin": ("kvd_client.cli_agents:unpin", "Let AGENT's pages be evicted again."),
    "verify": (
        "kvd_client.cli_agents:verify",
        "Read and verify every page file of AGENT; bad ones are written anew from clean copies in RAM.",
    ),
}
"""Where each command is, and the first sentence of its help."""

PATIENCE_S: Final = 1.0
"""What an interrupted command has to say goodbye to the daemon, whatever is pressed meanwhile."""


@click.group(
    cls=ErrorExits,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon (the message has the command that starts one), "
    "130 interrupted.",
)
@click.version_option(__version__, prog_name="kvd-client")
@shared_options
@click.pass_context
def cli(context: click.Context, /, **given: object) -> None:
    """Talk to a kvd daemon: continue an agent's text, and look after its pages.

    The daemon is found by --socket, --data-dir, KVD_SOCKET, KVD_DATA_DIR, what the configuration file (--config,
    KVD_CONFIG, `kvd config path`) says of socket and data_dir, or the platform's default, in that order.

    Example: kvd-client generate alice --text "Once upon a time"
    """
    context.obj = Defaults.of(given)


def _interrupt_once(_signum: int, _frame: FrameType | None) -> NoReturn:
    """The first Ctrl-C is an exception that cancels the call; the next one must not break into what that does.

    Within `PATIENCE_S` it is taken as the same wish; after that the process ends where it is.
    """
    began_s = time.monotonic()

    def again(_signum: int, _frame: FrameType | None) -> None:
        if time.monotonic() - began_s > PATIENCE_S:
            os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, again)
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the `kvd-client` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job of a shell ignores it
        signal.signal(signal.SIGINT, _interrupt_once)
    try:
        cli()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt but the interpreter's own end


if __name__ == "__main__":
    main()
