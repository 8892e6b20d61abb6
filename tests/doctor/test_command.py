"""`kvd doctor` as it is typed: its exit code, its JSON, its lines; beside a running daemon too."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvd import __version__
from kvd.cli import main
from kvd.config import DEFAULT_QUOTA_BYTES
from kvd.ops.sizes import format_size
from tests.doctor.folders import flip, pages, tree
from tests.support.daemon import Daemon, eventually, run_kvd, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own settings do not count."""
    for name in ("KVD_DATA_DIR", "KVD_SOCKET", "KVD_MODEL", "KVD_MODEL_DIR", "KVD_QUOTA"):
        monkeypatch.delenv(name, raising=False)


def doctor(data: Path, model: Path, *options: str) -> Result:
    """Run the command."""
    where = ("--data-dir", str(data), "--model", str(model), "--model-dir", str(model.parent / "none"))
    return CliRunner().invoke(main, ["doctor", *where, *options])


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The checks of a JSON report."""
    return {check["name"]: check for check in report["checks"]}


@pytest.fixture(scope="module")
def live(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Daemon]:
    """A running daemon with two agents."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as running:
        for name in ("ada", "bob"):
            running.client.generate(name, prose(600, name), max_tokens=4, temperature=0)
        yield running


def test_json_and_exit_code(data: Path, tiny_model_dir: Path) -> None:
    """One object on standard output with every promised key; 0 without problems, 1 with one."""
    well = doctor(data, tiny_model_dir, "--json", "--deep")
    assert well.exit_code == 0, well.output
    report = json.loads(well.stdout)
    assert (report["problems"], report["notices"], report["repaired"]) == (0, 1, [])
    assert set(report["checks"][0]) == {"name", "status", "facts", "text", "remedy"}
    assert {check["status"] for check in report["checks"]} == {"ok", "notice"}
    assert by_name(report)["versions"]["facts"]["kvd"] == __version__
    flip(pages(data)[0], pages(data)[0].stat().st_size // 2)
    ill = doctor(data, tiny_model_dir, "--json", "--deep")
    assert ill.exit_code == 1
    report = json.loads(ill.stdout)
    assert report["problems"] == 1
    assert list(by_name(report)["deep"]["facts"]["bad_pages"].values()) == ["wrong checksum"]
    assert by_name(report)["deep"]["remedy"].startswith(f"kvd doctor --repair --deep --data-dir {data};")
    healed = doctor(data, tiny_model_dir, "--json", "--deep", "--repair")
    assert healed.exit_code == 0
    assert len(json.loads(healed.stdout)["repaired"]) >= 1


def test_lines_for_people(data: Path, tiny_model_dir: Path) -> None:
    """A line a check, the remedy below it, the sum at the end; progress of a deep look goes to standard error."""
    outcome = doctor(data, tiny_model_dir, "--deep")
    lines = outcome.stdout.splitlines()
    assert lines[-1] == "0 problems, 1 notice"
    assert any(line.startswith("ok") and "every checksum holds" in line for line in lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("notice"))
    assert lines[at + 1].strip() == f"→ kvd calibrate {tiny_model_dir}"
    assert "verify pages and logs: 100 %" in outcome.stderr


def test_a_package_that_is_missing(data: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that cannot be imported is a problem with a remedy, not a traceback."""
    monkeypatch.setitem(sys.modules, "kvd.doctor", None)
    outcome = doctor(data, tiny_model_dir, "--json")
    assert outcome.exit_code == 1
    check = by_name(json.loads(outcome.stdout))["versions"]
    assert "kvd is not installed whole" in check["text"]
    assert "pip install ." in doctor(data, tiny_model_dir).stdout


def test_a_wrong_quota_is_a_wrong_call(data: Path, tiny_model_dir: Path) -> None:
    """A bad size is refused by name (P39); a quota below what is used is a problem (P25)."""
    assert doctor(data, tiny_model_dir, "--quota", "lots").exit_code == 2
    outcome = doctor(data, tiny_model_dir, "--quota", "100K", "--json")
    assert outcome.exit_code == 1
    assert by_name(json.loads(outcome.stdout))["disk"]["text"].startswith("the quota is used up")


def test_the_help_says_what_the_quota_is_for(data: Path, tiny_model_dir: Path) -> None:
    """The default is the daemon's own figure, and nobody takes the option for a limit that the doctor sets."""
    words = " ".join(doctor(data, tiny_model_dir, "--help").output.split())
    assert f"[default: {format_size(DEFAULT_QUOTA_BYTES)}]" in words
    assert "Disk that kvd serve may use; here what is used is compared with it" in words


def test_the_help_says_where_things_lie(data: Path, tiny_model_dir: Path) -> None:
    """Defaults and variables of each folder and socket, and what a look leaves unchanged and what it does not."""
    words = " ".join(doctor(data, tiny_model_dir, "--help").output.split())
    for variable in ("KVD_DATA_DIR", "KVD_SOCKET", "KVD_MODEL", "KVD_MODEL_DIR", "KVD_QUOTA"):
        assert f"[env var: {variable}" in words
    assert "[default: kvd in the user's data folder]" in words
    assert "[default: kvd.sock in the data folder]" in words
    assert "nothing changes in the data folder or beside the model; compiled kernels are kept" in words


@pytest.mark.daemon
def test_a_live_folder_gives_no_false_alarm(live: Daemon, tiny_model_dir: Path) -> None:
    """Beside an idle daemon all is well, the daemon is recognised, and not a byte changes (P8)."""

    def idle() -> bool:
        trees = [(live.statistics(), tree(live.data_dir))[1] for _ in range(3)]
        return trees[0] == trees[1] == trees[2]

    def looked_at() -> bool:
        """Whether all stayed the same; the daemon's own catalog, which it writes when it finds time, may be late."""
        nonlocal outcome
        before = tree(live.data_dir, tiny_model_dir)
        outcome = doctor(live.data_dir, tiny_model_dir, "--deep", "--json")
        after = tree(live.data_dir, tiny_model_dir)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert all(Path(name).name.startswith("catalog.sqlite3") for name in changed), changed
        return not changed

    outcome: Result | None = None
    eventually(idle, "it is idle")
    eventually(looked_at, "a look that changes nothing")
    assert outcome is not None
    checks = by_name(json.loads(outcome.stdout))
    assert {name for name, check in checks.items() if check["status"] != "ok"} == {"model"}
    assert checks["lock"]["facts"] == {"held": True, "pid": live.process.pid}
    assert checks["socket"]["facts"]["version"] == __version__
    assert checks["socket"]["facts"]["ready"] is True
    assert checks["catalog"]["facts"]["judged"] is False
    assert checks["pages"]["facts"]["pages"] == len(pages(live.data_dir)) >= 4
    assert "leftovers" not in checks


@pytest.mark.daemon
def test_a_busy_folder_gives_no_false_alarm(live: Daemon, tiny_model_dir: Path) -> None:
    """While turns are committed, logs compacted and agents deleted, a look still finds nothing wrong."""
    stop = threading.Event()
    turns: list[int] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with live.new_client() as client:
                for number in itertools.count():
                    if stop.is_set():
                        break
                    turns.append(number)
                    name = f"busy-{number % 3}"
                    client.generate(name, prose(260 + 20 * (number % 3), f"busy{number}"), max_tokens=2)
                    if number % 4 == 3:
                        client.delete(name)
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        looks = 0
        while worker.is_alive() and (looks < 5 or len(turns) < 9):
            looks += 1
            outcome = doctor(live.data_dir, tiny_model_dir, "--deep", "--json")
            wrong = {name for name, check in by_name(json.loads(outcome.stdout)).items() if check["status"] != "ok"}
            assert wrong == {"model"}, outcome.stdout
    finally:
        stop.set()
        worker.join()
    assert failures == []
    assert len(turns) >= 9


@pytest.mark.daemon
def test_a_killed_daemon_leaves_no_problem(tiny_model_dir: Path, zygote: Zygote | None) -> None:
    """What `kill -9` leaves in the middle of a turn is nothing to heal: the next start copes with it (P2)."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
        daemon.client.generate("ada", prose(600, "ada"), max_tokens=4)
        with daemon.client.generate_stream("ada", prose(900, "ada"), max_tokens=2000) as stream:
            next(iter(stream))
            daemon.kill()
        before = tree(daemon.data_dir)
        assert any(name.endswith("sqlite3-wal") for name in before)
        outcome = doctor(daemon.data_dir, tiny_model_dir, "--deep", "--json")
        assert outcome.exit_code == 0, outcome.stdout
        assert tree(daemon.data_dir) == before
        checks = by_name(json.loads(outcome.stdout))
        assert checks["lock"]["facts"]["held"] is False
        assert checks["socket"]["facts"]["state"] == "stale"
        assert checks["logs"]["facts"]["agents"] == 1


@pytest.mark.daemon
def test_damage_under_a_running_daemon_is_found(live: Daemon, tiny_model_dir: Path) -> None:
    """A page that rots beside a running daemon is found; the repair is refused with the daemon's pid."""
    path = live.page_file("bob", 0)
    flip(path, path.stat().st_size // 2)
    try:
        outcome = doctor(live.data_dir, tiny_model_dir, "--deep", "--json", "--repair")
    finally:
        flip(path, path.stat().st_size // 2)
    assert outcome.exit_code == 1
    checks = by_name(json.loads(outcome.stdout))
    assert checks["deep"]["facts"]["bad_pages"] == {path.stem: "wrong checksum"}
    assert "stop the daemon" in checks["deep"]["remedy"]
    assert f"process {live.process.pid}" in checks["repair"]["text"]
    assert path.exists()


def test_the_command_as_a_process(data: Path, tiny_model_dir: Path) -> None:
    """`kvd doctor` by itself: the launcher runs before it, so that it judges what the daemon would compute with."""
    outcome = run_kvd("doctor", "--data-dir", str(data), "--model", str(tiny_model_dir), "--json")
    assert outcome.code == 0, outcome.stderr
    assert by_name(outcome.json)["blas"]["facts"]["threads"] == 1
