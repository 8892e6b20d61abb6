"""The `kvd` command. Each command is imported when it is run (`kvd_client.cli_lazy`), so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from kvd import __version__
from kvd_client.cli_lazy import LazyGroup, loaded

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
COMMANDS: Final = {
    "bench": (
        "kvd.bench.cli:bench",
        "Measure speed, memory and quality, and prove that nothing is lost.",
    ),
    "calibrate": (
        "kvd.cli_model:calibrate",
        "Measure the page formats on the model NAME and keep the smallest within 2 % of its perplexity.",
    ),
    "completion": (
        "kvd_client.cli_completion:completion",
        "Print the script that completes this program's commands, options and names in a shell.",
    ),
    "config": (
        "kvd.cli_config:config",
        "What is set, and by what: flags, then environment, then the file, then defaults.",
    ),
    "demo": ("kvd.cli_demo:demo", "Three agents, a kill -9, and warm answers equal to an unbroken run."),
    "doctor": ("kvd.cli_doctor:doctor", "Examine machine, model, data folder and daemon."),
    "gateway": (
        "kvd.cli_gateway:gateway",
        "Serve OpenAI's and Anthropic's APIs over HTTP, in front of a running daemon.",
    ),
    "model": ("kvd.cli_model:model", "Fetch, import, describe and remove models."),
    "serve": ("kvd.cli_serve:serve", "Run the daemon in the foreground."),
    "service": (
        "kvd.cli_service:service",
        "Run kvd in the background, from login on: launchd on macOS, systemd elsewhere.",
    ),
}
"""Where each command is, and the first sentence of its help."""


class Commands(LazyGroup):
    """The commands, with the configuration file's values behind the options of the one that is run."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None and ctx.default_map is not None:
            from kvd.cli_config import add_defaults

            add_defaults(ctx, name, loaded(command))
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  (click's signature)
        """Run the command; Ctrl-C is one line and exit code 130, where the command has no words of its own."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("kvd: interrupted", err=True)
            ctx.exit(130)


def _use_file(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Callback of --config."""
    from kvd.cli_config import use_file

    return use_file(ctx, param, value)


@click.group(
    cls=Commands,
    lazy=COMMANDS,
    context_settings=CONTEXT,
    epilog="Exit codes: 0 done, 1 failed (a problem that doctor found, a promise of the demo that did not hold), "
    "2 wrong usage, 130 interrupted.",
)
@click.version_option(__version__, prog_name="kvd")
@click.option(
    "--config",
    "config_path",
    envvar="KVD_CONFIG",
    show_envvar=True,
    metavar="FILE",
    callback=_use_file,
    expose_value=False,
    is_eager=True,
    help="Settings in TOML; an empty name means none [default: kvd.toml in the user's configuration folder, if there].",
)
def main() -> None:
    """Virtual memory for agents' attention state: what a model keeps of each token it has read (its KV cache).

    `kvd serve` runs the daemon, `kvd model` manages models, `kvd demo` shows what it does in half a minute,
    `kvd bench` measures it. `kvd config` says what is set. Talk to a running daemon with `kvd-client`.
    """


__all__ = ["COMMANDS", "main"]
