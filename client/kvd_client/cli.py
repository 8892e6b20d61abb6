"""`kvd-client`: the commands. What they share is in `cli_common`, those that make text in `cli_text`."""

from __future__ import annotations

import click

from kvd_client import __version__
from kvd_client.cli_agents import AGENT_COMMANDS
from kvd_client.cli_common import Defaults, ErrorExits, shared_options
from kvd_client.cli_text import TEXT_COMMANDS
from kvd_client.cli_watch import WATCH_COMMANDS


@click.group(
    cls=ErrorExits,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon (the message has the command that starts one), "
    "130 interrupted.",
)
@click.version_option(__version__, prog_name="kvd-client")
@shared_options
@click.pass_context
def cli(context: click.Context, /, **given: object) -> None:
    """Talk to a kvd daemon: continue an agent's text, and look after its pages.

    The daemon is found by --socket, --data-dir, KVD_SOCKET, KVD_DATA_DIR or the platform's default, in that order.

    Example: kvd-client generate alice --text "Once upon a time"
    """
    context.obj = Defaults.of(given)


for _command in (*TEXT_COMMANDS, *AGENT_COMMANDS, *WATCH_COMMANDS):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the `kvd-client` command."""
    cli()


if __name__ == "__main__":
    main()
