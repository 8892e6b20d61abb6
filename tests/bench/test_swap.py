"""`kvd bench swap`: what goes out comes in, both sides do the same work, figures add up, bad calls are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.bench.swap import PlainFiles, read_plain, swap
from kvd.bench.swap_rig import Rig, smollm2_layout
from tests.support.store_data import memory_folder


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in memory where there is one: what is tested is not the disk."""
    yield from memory_folder()


def test_the_command_gives_all_figures(root: Path) -> None:
    """P26: rates and ratios of both directions, flushes, the checksum, the page table; nothing is left behind."""
    run = CliRunner().invoke(
        swap, ["--tokens", "300", "--repeats", "1", "--pages", "500", "--folder", str(root), "--json"]
    )
    assert run.exit_code == 0, run.output
    facts = json.loads(run.stdout)
    assert (facts["tokens"], facts["pages"]) == (512, 2)
    assert facts["agent_bytes"] == 2 * facts["page_bytes"] == 2 * 256 * 9_360
    for name in ("swap_in", "swap_out"):
        side = facts[name]
        assert min(side["kvd_mb_s"], side["plain_mb_s"], side["ratio"], side["bar"]) > 0
    assert facts["swap_out"]["plain_fsyncs"] == 2 * facts["pages"]
    assert facts["swap_out"]["kvd_fsyncs"] >= facts["swap_out"]["plain_fsyncs"]
    assert 0 < facts["checksum_share"] < 1
    assert facts["pager"]["pages"] == 500
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--tokens", "0"], "--tokens"), (["--kv-format", "q9"], "k8v4"), (["--pages", "99999999"], "10000000")],
)
def test_bad_values_are_refused_by_name(arguments: list[str], named: str) -> None:
    """Exit code 2, and what is allowed."""
    run = CliRunner().invoke(swap, arguments)
    assert run.exit_code == 2
    assert named in run.output


def test_pages_come_back_as_they_went(root: Path) -> None:
    """The rig is the daemon's own path: frames are gone in between, and hold the same bytes after."""
    with Rig(root / "data", smollm2_layout("q2"), 1000) as rig:
        space = rig.new_agent()
        rig.seal(space)
        before = rig.digest(space)
        rig.release(space)
        rig.evict(space)
        rig.load(space)
        assert rig.digest(space) == before
        assert rig.pages == len(rig.files(space)) == 4
        rig.release(space)


def test_plain_files_are_what_was_written(root: Path) -> None:
    """The other side moves the same bytes, and flushes file and folder."""
    plain = PlainFiles(root / "plain")
    contents = [bytes([number]) * 1000 for number in range(3)]
    plain.write(contents)
    assert plain.fsyncs == 6
    target = memoryview(bytearray(3000))
    read_plain(plain._paths, target)
    assert bytes(target) == b"".join(contents)
    plain.clear()
    assert not [path for path in root.rglob("*") if path.is_file()]
