"""Groups whose commands live in modules that are imported when somebody runs them.

Theory of operation. A group is made of stand-ins that know a command's name and the first sentence of its help. That is
enough to list commands, to complete their names and to say what was meant by a misspelt one; the real command takes
over where click makes its context, so that running it, its `--help` and completion inside of it need nothing special.
Whoever wants to look at a command's parameters asks `loaded`.

`kvd` and `kvd-client` both use it. May import click and the standard library.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class Deferred(click.Command):
    """A command by name, first sentence of its help and where it is.

    Args:
        name: as typed.
        home: `module:attribute`.
        summary: the sentence; `tests/test_docs.py` holds it to be the command's own.
    """

    def __init__(self, name: str, home: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self._home = home

    def load(self) -> click.Command:
        """Import the command."""
        module, _, attribute = self._home.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,  # noqa: ANN401  (click's)
    ) -> click.Context:
        """The real command's context: from here on this object plays no part."""
        return self.load().make_context(info_name, args, parent=parent, **extra)


class LazyGroup(click.Group):
    """A group of `Deferred` commands.

    Args:
        lazy: `module:attribute` and summary of each command, by name.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **more: Any) -> None:  # noqa: ANN401  (click's)
        super().__init__(*args, **more)
        for name, (home, summary) in lazy.items():
            self.add_command(Deferred(name, home, summary))


def loaded(command: click.Command) -> click.Command:
    """The command itself where it is a stand-in."""
    return command.load() if isinstance(command, Deferred) else command


__all__ = ["Deferred", "LazyGroup", "loaded"]
