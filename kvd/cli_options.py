"""Options that several commands take: declared once, so that help, variables, types and errors are the same everywhere.

`@model_options` adds --model and --model-dir, `@where_options(...)` --data-dir and --socket, and so on; a command's own
options stay with the command. May import click, kvd.cli_types, kvd.config, kvd.ops.levels, kvd.quant.spec and, inside
functions, kvd.model.paths and kvd.model.sources.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from click.shell_completion import CompletionItem

from kvd.cli_types import SIZE, NamedSizeType, ShareType
from kvd.config import ATTENTION, DEFAULT_MODEL
from kvd.ops.levels import LEVELS
from kvd.quant.spec import NAMED_FORMATS

F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol):
    """Gives a command one more option, or several."""

    def __call__(self, command: F, /) -> F:
        """The command."""


MODEL_HELP = "Installed model's name, or a folder in mlx-lm's layout."


def complete_models(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of installed models and of those that can be pulled; the folders of others complete as files do."""
    from kvd.model.paths import model_dir
    from kvd.model.sources import CATALOGUE

    try:
        root = model_dir(ctx.params.get("model_dir"))
        found = {path.parent.name for path in root.glob("*/config.json") if not path.parent.name.startswith(".")}
    except OSError:
        found = set()
    if "/" in incomplete or incomplete.startswith("~"):
        return [CompletionItem(incomplete, type="dir")]
    return [CompletionItem(name) for name in sorted({*found, *CATALOGUE}) if name.startswith(incomplete)]


model_option = click.option(
    "--model",
    "model_name",
    envvar="KVD_MODEL",
    show_envvar=True,
    default=DEFAULT_MODEL,
    show_default=True,
    shell_complete=complete_models,
    help=MODEL_HELP,
)
model_dir_option = click.option(
    "--model-dir",
    envvar="KVD_MODEL_DIR",
    show_envvar=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of installed models [default: kvd-models in the user's data folder].",
)
model_argument = click.argument("name", shell_complete=complete_models)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
json_last_option = click.option("--json", "as_json", is_flag=True, help="End with one JSON object; progress on stderr.")
attention_option = click.option(
    "--attention",
    type=click.Choice(ATTENTION),
    envvar="KVD_ATTENTION",
    show_envvar=True,
    default="auto",
    show_default=True,
    help="Attention backend.",
)
kv_format_option = click.option(
    "--kv-format",
    type=click.Choice(["auto", *NAMED_FORMATS]),
    envvar="KVD_KV_FORMAT",
    show_envvar=True,
    default="auto",
    show_default=True,
    help="Page format; auto takes the calibrated one.",
)
log_level_option = click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    envvar="KVD_LOG_LEVEL",
    show_envvar=True,
    default="info",
    show_default=True,
    help="Least level logged.",
)


def model_options(command: F) -> F:
    """Add --model and --model-dir."""
    return model_option(model_dir_option(command))


def fixed_format_option(default: str) -> Decorator:
    """--kv-format of what has no calibration to ask: one of the named formats."""
    return click.option(
        "--kv-format", type=click.Choice(list(NAMED_FORMATS)), default=default, show_default=True, help="Page format."
    )


def log_file_option(variable: str) -> Decorator:
    """--log-file, with its variable: daemon and gateway must not write into one file."""
    return click.option(
        "--log-file",
        envvar=variable,
        show_envvar=True,
        type=click.Path(path_type=Path),
        help="JSON lines go here instead of stderr.",
    )


def where_options(*, folder: str, socket: str) -> Decorator:
    """Add --data-dir and --socket.

    Args:
        folder: what the folder is for this command, without a full stop.
        socket: the same of the socket.
    """

    def add(command: F) -> F:
        data_dir_option = click.option(
            "--data-dir",
            envvar="KVD_DATA_DIR",
            show_envvar=True,
            type=click.Path(path_type=Path),
            help=f"{folder} [default: kvd in the user's data folder].",
        )
        socket_option = click.option(
            "--socket",
            envvar="KVD_SOCKET",
            show_envvar=True,
            type=click.Path(path_type=Path),
            help=f"{socket} [default: kvd.sock in the data folder].",
        )
        return data_dir_option(socket_option(command))

    return add


def memory_options(command: F) -> F:
    """Add the limits of memory beside the budget."""
    for option in (
        click.option(
            "--namespace-quota",
            "namespace_quotas",
            type=NamedSizeType(),
            multiple=True,
            envvar="KVD_NAMESPACE_QUOTA",
            show_envvar=True,
            help="RAM that pages of a namespace's agents should take at most; may be given several times.",
        ),
        click.option(
            "--namespace-disk-quota",
            "namespace_disk_quotas",
            type=NamedSizeType(),
            multiple=True,
            envvar="KVD_NAMESPACE_DISK_QUOTA",
            show_envvar=True,
            help="Disk that files of a namespace's agents may take at most; may be given several times.",
        ),
        click.option(
            "--branch-limit",
            type=SIZE,
            envvar="KVD_BRANCH_LIMIT",
            show_envvar=True,
            help="Bytes that an agent's abandoned branches may take [default: any, of four branches].",
        ),
        click.option(
            "--footprint-limit",
            type=SIZE,
            envvar="KVD_FOOTPRINT_LIMIT",
            show_envvar=True,
            help="Memory of the whole process above which new requests are told to come again "
            "[default: nine tenths of the machine's].",
        ),
        click.option(
            "--pin-limit",
            type=ShareType(),
            envvar="KVD_PIN_LIMIT",
            show_envvar=True,
            default="50%",
            show_default=True,
            help="What pinned agents may hold together: a percentage of what the budget leaves to requests, or a size.",
        ),
    ):
        command = option(command)
    return command


__all__ = [
    "MODEL_HELP",
    "attention_option",
    "complete_models",
    "fixed_format_option",
    "json_last_option",
    "json_option",
    "kv_format_option",
    "log_file_option",
    "log_level_option",
    "memory_options",
    "model_argument",
    "model_dir_option",
    "model_option",
    "model_options",
    "where_options",
]
