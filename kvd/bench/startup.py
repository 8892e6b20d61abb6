"""`kvd bench startup`: how long a start takes with many agents on disk, beyond what it takes with none.

The same daemon is started on an empty data folder and on one of many agents, in turns; medians count. What the start
read of the folder is what the daemon's own log says. The first start on the many is after their files were dropped from
the page cache.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kvd.bench.harness import DaemonProcess, drop_page_cache, scratch_folder
from kvd.bench.many_agents import TAIL_TOKENS, make_agents
from kvd.cli_common import fail
from kvd.cli_options import json_option, model_options
from kvd.errors import EnvironmentFault, KvdError
from kvd.ids import Fingerprint
from kvd.model.cache_spec import build_cache_spec
from kvd.model.folder import ModelFolder
from kvd.scheduler.core import NUMERICS

BAR_S = 1.0
"""What a start may take beyond loading the model."""

KV_FORMAT = "k8v4"


@dataclass(frozen=True, slots=True)
class Report:
    """Figures.

    Attributes:
        agents, pages: on disk; pages of all groups.
        tokens: of each agent.
        folder_bytes: length of all files.
        empty_s: seconds to ready with nothing on disk.
        ready_s: with the agents, files in the page cache.
        cold_s: with the agents, files dropped from the page cache; one start.
        beyond_s: `ready_s` less `empty_s`.
        cold_beyond_s: likewise.
        cpu_beyond_s: the same in processor time of the daemon, which other work on the machine lengthens less; None
            where the system does not tell.
        recovery_s: of it, as the daemon's log says, until agents were known to the store.
        asleep: agents whose logs were not read.
        read_bytes: of files, the catalog apart, until then.
        reads: how often a file was read.
        catalog_bytes: length of the catalog, which is read whole.
        repeats: starts of each kind; medians count.
    """

    model: str
    agents: int
    pages: int
    tokens: int
    folder_bytes: int
    empty_s: float
    ready_s: float
    cold_s: float
    beyond_s: float
    cold_beyond_s: float
    cpu_beyond_s: float | None
    recovery_s: float
    asleep: int
    read_bytes: int
    reads: int
    catalog_bytes: int
    repeats: int


def measure(model: ModelFolder, folder: Path, *, agents: int, pages: int, repeats: int) -> Report:
    """Fill a folder and start daemons.

    Args:
        model: what they serve.
        folder: a private folder for data and logs.
        agents: on disk.
        pages: whole pages of each cache group of each agent.
        repeats: starts of each kind.

    Raises:
        KvdError: a daemon did not start, or found something else than was made.
    """
    options = ("--kv-format", KV_FORMAT)
    empty = DaemonProcess(folder / "empty", model=str(model.path), options=options)
    with empty, empty.client() as client:  # this one also compiles what is compiled once a machine
        facts: dict[str, Any] = client.call("model.info")
    spec = build_cache_spec(
        model.config(), model_name=model.name, fingerprint=Fingerprint(facts["fingerprint"]), item_bytes=2
    )
    layouts = [group.layout(group.format(KV_FORMAT)) for group in spec.groups]
    if [layout.format_id for layout in layouts] != facts["kv_format_ids"]:
        raise EnvironmentFault(f"the daemon serves formats {facts['kv_format_ids']}, which this bench cannot make")
    many = DaemonProcess(folder / "many", model=str(model.path), options=options)
    tokens = make_agents(many.data_dir, spec.fingerprint, layouts, agents=agents, pages=pages, numerics=NUMERICS)
    os.sync()  # else the first start would pay for thousands of new names that nobody has flushed
    drop_page_cache(many.data_dir)
    cold_s, _ = _start(many, agents)
    starts = [(_start(empty, 0), _start(many, agents)) for _ in range(repeats)]
    found = next(line for line in reversed(_log(many)) if line.get("event") == "recovered")
    none_s, all_s = (statistics.median(each[which][0] for each in starts) for which in (0, 1))
    cpu_s = [with_all[1] - with_none[1] for with_none, with_all in starts]
    (catalog,) = many.data_dir.glob("*/catalog.sqlite3")
    return Report(
        model=model.name,
        agents=agents,
        pages=agents * pages * len(layouts),
        tokens=tokens,
        folder_bytes=sum(path.stat().st_size for path in many.data_dir.rglob("*") if path.is_file()),
        empty_s=round(none_s, 3),
        ready_s=round(all_s, 3),
        cold_s=round(cold_s, 3),
        beyond_s=round(all_s - none_s, 3),
        cold_beyond_s=round(cold_s - none_s, 3),
        cpu_beyond_s=round(statistics.median(cpu_s), 3) if sys.platform.startswith("linux") else None,
        recovery_s=found["seconds"],
        asleep=found["asleep"],
        read_bytes=found["read_bytes"],
        reads=found["reads"],
        catalog_bytes=catalog.stat().st_size,
        repeats=repeats,
    )


def _start(daemon: DaemonProcess, agents: int) -> tuple[float, float]:
    """Seconds to ready, and processor time until then."""
    seconds = daemon.start()
    cpu_s = _cpu_s(daemon.pid)
    try:
        with daemon.client() as client:
            known = client.call("statistics")["agents"]
    finally:
        daemon.kill()
    if known != agents:
        raise EnvironmentFault(f"the daemon knows {known} agents instead of {agents}: {daemon.last_words()}")
    return seconds, cpu_s


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _log(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]


@click.command("startup")
@click.option("--agents", type=click.IntRange(1), default=1000, show_default=True, help="Agents on disk.")
@click.option(
    "--pages", type=click.IntRange(0), default=8, show_default=True, help="Whole pages of each cache group an agent."
)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Starts of each kind.")
@model_options
@json_option
def startup(agents: int, pages: int, repeats: int, model_name: str, model_dir: Path | None, as_json: bool) -> None:
    """Time from starting the daemon to its first possible answer, with many agents on disk against none.

    The agents are made in a temporary folder; their KV is zeros, which take no room on most disks.

    Example: kvd bench startup --agents 1000 --pages 8 --json
    """
    from kvd.model.paths import model_dir as models
    from kvd.model.registry import resolve

    try:
        with scratch_folder() as folder:
            model = resolve(model_name, models(model_dir))
            report = measure(model, folder, agents=agents, pages=pages, repeats=repeats)
    except KvdError as error:
        fail(error)
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    click.echo(
        f"{report.model}: {report.agents} agents of {report.tokens} tokens ({TAIL_TOKENS} in the log), "
        f"{report.pages} pages, {report.folder_bytes:,} bytes; medians of {report.repeats}"
    )
    click.echo(
        f"ready in {report.ready_s:.2f} s, {report.empty_s:.2f} with nothing on disk: {report.beyond_s:.2f} s beyond "
        f"(bar {BAR_S:g}); cold {report.cold_beyond_s:.2f} s beyond"
    )
    if report.cpu_beyond_s is not None:
        click.echo(f"processor time beyond that with nothing on disk: {report.cpu_beyond_s:.2f} s")
    click.echo(
        f"read: {report.read_bytes:,} bytes in {report.reads} reads, and the catalog ({report.catalog_bytes:,} bytes); "
        f"{report.asleep} agents sleep"
    )


__all__ = ["BAR_S", "Report", "measure", "startup"]
