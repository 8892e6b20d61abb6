"""`kvd serve`: its options, the settings they come to, and what of them follows the configuration file at run time.

May import click, kvd's configuration and command modules, kvd.daemon, kvd.errors, kvd.model.paths, kvd.ops,
kvd.quant.spec, kvd.record and kvd_client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvd.cli_common import ensure_model, fail, unusable
from kvd.cli_config import came_from_file, followed_path, place_in_file, reread
from kvd.cli_gateway import http_address, http_option
from kvd.cli_options import (
    attention_option,
    kv_format_option,
    log_file_option,
    log_level_option,
    memory_options,
    model_options,
    where_options,
)
from kvd.cli_types import SIZE, AutoOrCount, WriteLimit
from kvd.config import (
    DEFAULT_BUDGET_BYTES,
    DEFAULT_QUOTA_BYTES,
    EVICTION,
    MAX_BATCH,
    MAX_CHUNK_TOKENS,
    MAX_DECODE_SHARE,
    MAX_DRAIN_GRACE_S,
    PREFETCH,
    SHARING,
    SWAP,
    ConfigError,
    Settings,
)
from kvd.errors import EnvironmentFault, KvdError
from kvd.ops.sizes import format_size
from kvd_client.paths import default_data_dir, default_socket


@click.command()
@where_options(folder="Swap, logs, catalog (0700)", socket="Unix socket to listen on")
@model_options
@click.option(
    "--budget",
    type=SIZE,
    envvar="KVD_BUDGET",
    show_envvar=True,
    default=DEFAULT_BUDGET_BYTES,
    help=f"RAM for KV [default: {format_size(DEFAULT_BUDGET_BYTES)}].",
)
@memory_options
@click.option(
    "--quota",
    type=SIZE,
    envvar="KVD_QUOTA",
    show_envvar=True,
    default=DEFAULT_QUOTA_BYTES,
    help=f"Disk for everything [default: {format_size(DEFAULT_QUOTA_BYTES)}].",
)
@kv_format_option
@attention_option
@click.option(
    "--sharing",
    type=click.Choice(SHARING),
    envvar="KVD_SHARING",
    show_envvar=True,
    default="namespace",
    show_default=True,
    help="Who maps pages of the same text once: agents of a namespace, or each agent for itself.",
)
@click.option(
    "--chunk",
    "chunk_tokens",
    type=click.IntRange(1, MAX_CHUNK_TOKENS),
    envvar="KVD_CHUNK",
    show_envvar=True,
    default=512,
    show_default=True,
    help="Tokens of a prefill step.",
)
@click.option(
    "--max-queued",
    type=click.IntRange(1),
    envvar="KVD_MAX_QUEUED",
    show_envvar=True,
    default=256,
    show_default=True,
    help="Requests that may wait.",
)
@click.option(
    "--max-batch",
    type=AutoOrCount(MAX_BATCH),
    envvar="KVD_MAX_BATCH",
    show_envvar=True,
    default="auto",
    show_default=True,
    help="Requests that run at once, of different agents; auto: what memory holds and the device gains by.",
)
@click.option(
    "--decode-share",
    type=click.FloatRange(0, MAX_DECODE_SHARE),
    envvar="KVD_DECODE_SHARE",
    show_envvar=True,
    default=0.5,
    show_default=True,
    help="Part of the time decoding gets at least while others prefill.",
)
@click.option(
    "--prefetch",
    type=click.Choice(PREFETCH),
    envvar="KVD_PREFETCH",
    show_envvar=True,
    default="predict",
    show_default=True,
    help="Load pages ahead: for turns that wait and agents likely to be next, for turns that wait, or not at all.",
)
@click.option(
    "--eviction",
    type=click.Choice(EVICTION),
    envvar="KVD_EVICTION",
    show_envvar=True,
    default="lru",
    show_default=True,
    help="Whose pages go first: the least recently used agent's, or that whose next turn seems farthest (reuse).",
)
@click.option(
    "--swap",
    type=click.Choice(SWAP),
    envvar="KVD_SWAP",
    show_envvar=True,
    default="on",
    show_default=True,
    help="off: KV in RAM only: nothing is durable, what is evicted is computed again, the data folder stays as is.",
)
@click.option(
    "--write-limit",
    type=WriteLimit(),
    envvar="KVD_WRITE_LIMIT",
    show_envvar=True,
    default="off",
    show_default=True,
    help="Bytes to disk in a minute, such as 500MB/min, beyond which pages wait; a reply says if its turn does.",
)
@click.option(
    "--trace",
    envvar="KVD_TRACE",
    show_envvar=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what agents do to pages there, without text or names, for `kvd bench eviction`.",
)
@click.option(
    "--warm-from",
    type=click.Path(path_type=Path),
    multiple=True,
    envvar="KVD_WARM_FROM",
    show_envvar=True,
    help="Folder of exported agents, imported when their names are first used; may be given several times.",
)
@click.option(
    "--drain-grace",
    "drain_grace_s",
    type=click.FloatRange(0, MAX_DRAIN_GRACE_S),
    envvar="KVD_DRAIN_GRACE",
    show_envvar=True,
    default=30.0,
    show_default=True,
    help="Seconds a stop lets requests finish.",
)
@http_option
@log_level_option
@log_file_option("KVD_LOG_FILE")
@click.option(
    "--check",
    is_flag=True,
    envvar="KVD_CHECK",
    show_envvar=True,
    help="Verify the pager's laws after every request (slow).",
)
@click.pass_context
def serve(ctx: click.Context, /, **given: Any) -> None:  # noqa: ANN401  (click's parameters)
    """Run the daemon in the foreground. A missing default model is pulled first.

    SIGTERM or Ctrl-C drains: running requests finish, nothing is lost; a second one forces.

    Example: kvd serve --budget 8GB --data-dir ~/kvd
    """
    from kvd.daemon import make_private_folders
    from kvd.daemon import serve as run
    from kvd.record import follow_recorded_threads
    from kvd.reloading import SettingsFile

    # links are followed: a data folder on another disk is common, and its real path is what is locked and checked
    data = (Path(given["data_dir"]) if given["data_dir"] else default_data_dir()).expanduser().resolve()
    follow_recorded_threads(data)
    try:
        settings = settings_of(ctx, data, given)
        if ctx.get_parameter_source("warm_from") is ParameterSource.COMMANDLINE:
            _check_folders(settings.warm_from)
        # only now: a wrong setting, or a data folder that cannot be made, must not cost the minutes of a pull
        make_private_folders(data)
        path = followed_path(ctx)
        file = None if path is None else SettingsFile(path, settings, partial(_settings_now, ctx, path, data))
        run(replace(settings, model=str(ensure_model(settings.model, settings.model_dir))), file)
    except KvdError as error:
        fail(error)
    except OSError as error:  # a folder that cannot be made or written: the operator's to heal, no bug of ours
        fail(EnvironmentFault(unusable(error, data)))


def settings_of(ctx: click.Context, data: Path, given: Mapping[str, Any]) -> Settings:
    """What the options come to.

    Args:
        ctx: of the command.
        data: the data folder.
        given: its parameters, by click's names.

    Raises:
        KvdError: a value is wrong; the message names it and what is allowed, and where it stands in the file.
    """
    try:
        return _checked_settings(ctx, data, given)
    except ConfigError as error:
        setting = str(error.data.get("setting", ""))
        raise ConfigError(place_in_file(ctx, setting) + error.message, setting=setting) from None


def _checked_settings(ctx: click.Context, data: Path, given: Mapping[str, Any]) -> Settings:
    from kvd.model.paths import model_dir as models

    socket = given["socket"]
    if came_from_file(ctx, "socket") and given["data_dir"] and not came_from_file(ctx, "data_dir"):
        socket = None  # another folder was named on the spot: its daemon is meant
    return Settings(
        data_dir=data,
        socket=Path(socket).expanduser().absolute() if socket else default_socket(given["data_dir"]),
        model=given["model_name"],
        model_dir=models(given["model_dir"]),
        budget_bytes=given["budget"],
        pin_limit=given["pin_limit"],
        footprint_limit_bytes=given["footprint_limit"],
        branch_limit_bytes=given["branch_limit"],
        namespace_quotas=given["namespace_quotas"],
        namespace_disk_quotas=given["namespace_disk_quotas"],
        quota_bytes=given["quota"],
        kv_format=given["kv_format"],
        attention=given["attention"],
        sharing=given["sharing"],
        chunk_tokens=given["chunk_tokens"],
        max_queued=given["max_queued"],
        max_batch=given["max_batch"],
        decode_share=given["decode_share"],
        prefetch=given["prefetch"],
        eviction=given["eviction"],
        swap=given["swap"],
        write_limit_bytes=given["write_limit"],
        trace=Path(given["trace"]).expanduser().absolute() if given["trace"] else None,
        warm_from=tuple(Path(folder).expanduser().absolute() for folder in given["warm_from"]),
        drain_grace_s=given["drain_grace_s"],
        http=http_address(given["http"]),
        log_level=given["log_level"],
        log_file=given["log_file"],
        check=given["check"],
    )


def _check_folders(warm_from: tuple[Path, ...]) -> None:
    """Refuse what somebody has just typed and is not there.

    What file or environment name may come later, such as a disk at boot: the daemon starts, and the log says so.

    Raises:
        ConfigError: one is no folder.
    """
    for folder in warm_from:
        if not folder.is_dir():
            fault = "is no folder" if folder.exists() else "does not exist"
            raise ConfigError(
                f"warm-from: {folder} {fault}; give a folder with files of `kvd-client export`", setting="warm-from"
            )


def _settings_now(ctx: click.Context, path: Path, data: Path) -> Settings:
    """The settings that the configuration file, as it is now, comes to; flags and variables as they were."""
    now = reread(ctx, path)
    return settings_of(now, data, now.params)


__all__ = ["serve", "settings_of"]
