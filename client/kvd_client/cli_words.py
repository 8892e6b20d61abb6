"""The daemon's refusals in the words of the command line: it names parameters of the protocol, people typed options.

Only the beginning of a message is changed, where the refused parameter stands, and fixed phrases; what a message quotes
stays as it is. One message of a conversation keeps the protocol's name, `messages[2]`: options and a file make up that
list together, and only --message has the name of one. May import click and kvd_client.errors.
"""

from __future__ import annotations

from typing import Final

import click

from kvd_client.errors import RemoteError

PHRASES: Final = {
    "; force replaces it": "; --force replaces it",
    "; replace overwrites it": "; --replace overwrites it",
    "; lower max_tokens, or send on_context_full: stop": "; lower --max-tokens, or give --on-context-full stop",
    " takes max_tokens of at most ": " takes --max-tokens of at most ",
}
"""What the daemon advises, and how the same is said to somebody at a shell."""

OTHER_NAMES: Final = {
    "budget": "size",
    "namespace_disk_quotas": "disk_quotas",
    "namespace_quotas": "quotas",
    "path": "file",
}
"""Parameters of the protocol that commands know by another name."""


def command_words(error: RemoteError, command: click.Command | None) -> str:
    """An error's message as somebody needs it who called a command.

    Args:
        error: the daemon's.
        command: the one that was run.
    """
    message = error.message
    name = error.data.get("parameter")
    if command is not None and isinstance(name, str) and name and message.startswith(name):
        rest = message[len(name) :]
        if rest[:1] == " " or (rest[:1] == "[" and name != "messages"):
            message = _typed(command, name) + rest
    for said, meant in PHRASES.items():
        message = message.replace(said, meant)
    if error.name == "draining":
        message += "; a drain is not undone: restart the daemon (kvd-client shutdown, then kvd serve)"
    return message


def _typed(command: click.Command, name: str) -> str:
    """How a parameter is given to a command; its own name where it is not."""
    for param in command.params:
        if param.name in (name, OTHER_NAMES.get(name)):
            return max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name
    return name


__all__ = ["OTHER_NAMES", "PHRASES", "command_words"]
