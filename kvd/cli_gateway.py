"""`kvd gateway`: OpenAI's and Anthropic's APIs over HTTP, in front of a running daemon.

Heavy imports happen inside, so that `--help` is quick. May import kvd.gateway,
kvd.cli_config, kvd.cli_types, kvd.config, kvd.ops and kvd_client.paths.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import click

from kvd.cli_config import came_from_file, config_path, place_in_file
from kvd.cli_options import log_file_option, log_level_option, where_options
from kvd.cli_types import SIZE
from kvd.config import ConfigError

DEFAULT_LISTEN = "127.0.0.1:8787"


@click.command()
@click.option(
    "--listen",
    envvar="KVD_GATEWAY_LISTEN",
    show_envvar=True,
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Where to listen; port 0 takes a free one. Anything but loopback needs --api-key-file.",
)
@where_options(folder="The daemon's data folder", socket="The daemon's Unix socket")
@click.option(
    "--api-key-file",
    envvar="KVD_GATEWAY_API_KEY_FILE",
    show_envvar=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keys that clients must send, one a line, KEY or KEY NAMESPACE; mode 0600. Read again when it changes.",
)
@click.option(
    "--allow-host",
    multiple=True,
    envvar="KVD_GATEWAY_ALLOW_HOST",
    show_envvar=True,
    help="A name that requests may be sent to; may be given several times.",
)
@click.option(
    "--namespace",
    envvar="KVD_GATEWAY_NAMESPACE",
    show_envvar=True,
    default="default",
    show_default=True,
    help="Namespace of all requests when there are no keys; a key that names none has one of its own.",
)
@click.option(
    "--alias",
    multiple=True,
    envvar="KVD_GATEWAY_ALIAS",
    show_envvar=True,
    help="Another name of the loaded model, such as 'claude-*'; may be given several times.",
)
@click.option(
    "--rule-on",
    multiple=True,
    envvar="KVD_GATEWAY_RULE_ON",
    show_envvar=True,
    metavar="NAME",
    help="Switch a canonicalisation rule on (see --list-rules).",
)
@click.option(
    "--rule-off",
    multiple=True,
    envvar="KVD_GATEWAY_RULE_OFF",
    show_envvar=True,
    metavar="NAME",
    help="Switch a canonicalisation rule off.",
)
@click.option("--list-rules", is_flag=True, help="Print the canonicalisation rules and exit.")
@click.option("--list-identities", is_flag=True, help="Print what names a request's agent, in order, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with --list-rules and --list-identities.")
@click.option(
    "--max-body",
    envvar="KVD_GATEWAY_MAX_BODY",
    show_envvar=True,
    type=SIZE,
    default="8MiB",
    show_default=True,
    help="Bytes of a request's body.",
)
@click.option(
    "--default-max-tokens",
    envvar="KVD_GATEWAY_DEFAULT_MAX_TOKENS",
    show_envvar=True,
    type=click.IntRange(1, 1_000_000),
    default=4096,
    show_default=True,
    help="New tokens of a chat or response that says no limit.",
)
@click.option(
    "--anonymous-ttl",
    "anonymous_ttl_s",
    envvar="KVD_GATEWAY_ANONYMOUS_TTL",
    show_envvar=True,
    type=click.FloatRange(0, min_open=True),
    default=86_400.0,
    show_default=True,
    help="Seconds after their last use in which agents of requests that name none are deleted.",
)
@click.option(
    "--max-anonymous",
    envvar="KVD_GATEWAY_MAX_ANONYMOUS",
    show_envvar=True,
    type=click.IntRange(1, 1_000_000),
    default=1000,
    show_default=True,
    help="Such agents kept; the oldest go first.",
)
@click.option(
    "--group-ttl",
    "group_ttl_s",
    envvar="KVD_GATEWAY_GROUP_TTL",
    show_envvar=True,
    type=click.FloatRange(0, min_open=True),
    default=2_592_000.0,
    show_default=True,
    help="Seconds after their last use in which agents of sessions, users and cache keys are deleted.",
)
@click.option(
    "--show-divergence/--no-show-divergence",
    envvar="KVD_GATEWAY_SHOW_DIVERGENCE",
    show_envvar=True,
    help="Have x-kvd-divergence quote the stored text where a prompt parts from it, not only say where; without keys "
    "the page, too.",
)
@click.option(
    "--page",
    envvar="KVD_GATEWAY_PAGE",
    show_envvar=True,
    type=click.Choice(("own", "all", "off")),
    default="own",
    show_default=True,
    help="The page at /: agents of the key's namespace, or without keys of --namespace; of all namespaces (without "
    "keys only); or no page.",
)
@click.option(
    "--ping",
    "ping_s",
    envvar="KVD_GATEWAY_PING",
    show_envvar=True,
    type=click.FloatRange(0, min_open=True),
    default=15.0,
    show_default=True,
    help="Seconds after which a silent stream says that it is alive.",
)
@log_level_option
@log_file_option("KVD_GATEWAY_LOG_FILE")
@click.option("--with-parent", is_flag=True, hidden=True, help="End when standard input does (kvd serve --http).")
def gateway(
    listen: str,
    data_dir: Path | None,
    socket: Path | None,
    api_key_file: Path | None,
    allow_host: tuple[str, ...],
    namespace: str,
    alias: tuple[str, ...],
    rule_on: tuple[str, ...],
    rule_off: tuple[str, ...],
    list_rules: bool,
    list_identities: bool,
    as_json: bool,
    max_body: int,
    default_max_tokens: int,
    anonymous_ttl_s: float,
    max_anonymous: int,
    group_ttl_s: float,
    show_divergence: bool,
    page: str,
    ping_s: float,
    log_level: str,
    log_file: Path | None,
    with_parent: bool,
) -> None:
    """Serve OpenAI's and Anthropic's APIs over HTTP, in front of a running daemon.

    A process of its own: it keeps no cache, and its end costs none. Prints the base URL as one JSON line on standard
    output once it listens.

    Example: kvd gateway --alias 'claude-*'
    """
    from kvd.gateway import (
        RULES,
        CannotListen,
        GatewayConfigError,
        GatewaySettings,
        KeyRing,
        chosen_rules,
        parse_address,
        read_key_file,
    )
    from kvd.gateway.identity import SOURCES
    from kvd.gateway.settings import host_names
    from kvd_client.paths import resolve_socket

    if as_json and not (list_rules or list_identities):
        raise click.UsageError("--json goes with --list-rules or --list-identities")
    if as_json:
        facts: dict[str, object] = {}
        if list_rules:
            facts["rules"] = [{"name": r.name, "default": r.default, "summary": r.summary} for r in RULES]
        if list_identities:
            facts["identities"] = [{"name": name, "summary": summary} for name, summary in SOURCES]
        click.echo(json.dumps(facts))
        return
    if list_rules or list_identities:
        rows = [(r.name, "on" if r.default else "off", r.summary) for r in RULES] if list_rules else []
        rows += [(name, "", summary) for name, summary in SOURCES] if list_identities else []
        for name, state, summary in rows:
            click.echo(f"{name:22} {state:4}{summary}")
        return
    ctx = click.get_current_context()
    if came_from_file(ctx, "socket") and data_dir and not came_from_file(ctx, "data_dir"):
        socket = None  # another folder was named on the spot: its daemon is meant
    try:
        host, port = parse_address(listen)
        key_file = None if api_key_file is None else api_key_file.expanduser().absolute()
        settings = GatewaySettings(
            socket=resolve_socket(socket, data_dir),
            host=host,
            port=port,
            keys=KeyRing() if key_file is None else read_key_file(key_file),
            key_file=key_file,
            allowed_hosts=host_names(allow_host),
            namespace=namespace,
            aliases=alias,
            rules=chosen_rules(rule_on, rule_off),
            max_body_bytes=max_body,
            default_max_tokens=default_max_tokens,
            anonymous_ttl_s=anonymous_ttl_s,
            max_anonymous=max_anonymous,
            group_ttl_s=group_ttl_s,
            show_divergence=show_divergence,
            page=page,
            ping_s=ping_s,
        )
        _run(settings, log_level, log_file, with_parent=with_parent)
    except (GatewayConfigError, CannotListen, OSError) as error:  # OSError: the log file
        where = place_in_file(ctx, error.setting) if isinstance(error, GatewayConfigError) else ""
        click.echo(f"kvd: {where}{error}", err=True)
        sys.exit(2 if isinstance(error, GatewayConfigError) else 1)


http_option = click.option(
    "--http",
    envvar="KVD_HTTP",
    show_envvar=True,
    metavar="HOST:PORT",
    help="Serve OpenAI's and Anthropic's APIs there, too: runs `kvd gateway` as a child process.",
)
"""`--http` of `kvd serve`."""


def http_address(text: str | None) -> str | None:
    """The value of `--http`, as a gateway will accept it: a daemon must not start with one that cannot.

    The gateway is to read the same configuration file: its name goes into the environment.

    Raises:
        ConfigError: it is no address, or one that needs a key.
    """
    if text is None:
        return None
    from kvd.gateway import GatewayConfigError, parse_address
    from kvd.gateway.settings import is_loopback

    try:
        host, _ = parse_address(text)
    except GatewayConfigError as error:
        raise ConfigError(f"http: {error}", setting="http") from None
    defaults = (click.get_current_context().find_root().default_map or {}).get("gateway", {})
    if not is_loopback(host) and not (os.environ.get("KVD_GATEWAY_API_KEY_FILE") or defaults.get("api_key_file")):
        raise ConfigError(
            f"http: {host} is not a loopback address; set KVD_GATEWAY_API_KEY_FILE, or use 127.0.0.1", setting="http"
        )
    os.environ["KVD_CONFIG"] = str(config_path(click.get_current_context()) or "")
    return text


def _run(settings: object, log_level: str, log_file: Path | None, *, with_parent: bool) -> None:
    from kvd.gateway import GatewaySettings
    from kvd.gateway.serve import run
    from kvd.ops.logs import get_logger, setup_logging

    assert isinstance(settings, GatewaySettings)

    def ready(url: str) -> None:
        click.echo(json.dumps({"url": url, "socket": str(settings.socket)}))
        sys.stdout.flush()
        log.info("listening", url=url, socket=str(settings.socket), keys=len(settings.keys.digests))

    with ExitStack() as stack:
        stack.enter_context(setup_logging(level=log_level, file=log_file))
        log = get_logger("kvd.gateway")
        run(settings, log, ready=ready, with_parent=with_parent)


__all__ = ["gateway", "http_address", "http_option"]
