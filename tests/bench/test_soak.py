"""`kvd bench soak`: a short one passes, and each of its checks fails on a fault that is planted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvd.bench import soak_check as check
from kvd.bench.cli import bench
from kvd.bench.soak import render
from kvd.bench.soak_run import SoakReport
from kvd.bench.soak_transcript import Claim, Transcript
from kvd.bench.soak_verify import Violation, verify_agent
from kvd.doctor import Options
from kvd.vm.page import PageState
from tests.support.daemon import Daemon, short_folder
from tests.support.prose import prose
from tests.support.zygote import Zygote

FINGERPRINT, PAGE = "0" * 32, "ab" + "1" * 30


@pytest.mark.long
@pytest.mark.daemon
def test_a_short_soak_with_kills_passes(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P23, P33, P2: three clients that misbehave and die, a daemon that is killed under them, and all is well after."""
    monkeypatch.setenv("KVD_THREADS", "1")
    options = ("--minutes", "0.08", "--clients", "3", "--budget", "6MB", "--kill-daemon-every", "2.5", "--seed", "4")
    result = CliRunner().invoke(bench, ["soak", *options, "--model", str(tiny_model_dir), "--json"])
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["troubles"] == []
    assert result.exit_code == 0, result.output
    assert report["verdict"] == "passed"
    assert report["daemon_kills"] >= 2
    assert report["turns"] > 0
    assert report["verified"] > 0
    assert report["continued"] > 0
    assert report["peak_footprint_bytes"] > 0


@pytest.mark.parametrize(
    "arguments", [["--minutes", "0"], ["--clients", "0"], ["--budget", "lots"], ["--folder", "."]], ids=" ".join
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], tiny_model_dir: Path) -> None:
    """As for every other command, before a daemon is started; a folder with something in it is not touched."""
    result = CliRunner().invoke(bench, ["soak", "--model", str(tiny_model_dir), *arguments])
    assert result.exit_code == 2, result.output


def test_the_report_names_what_is_wrong() -> None:
    """The verdict is the last line; each trouble has a line of its own."""
    assert render(SoakReport()).endswith("verdict: passed")
    text = render(SoakReport(troubles=["frames leak", "a is gone"]))
    assert text.endswith("WRONG: frames leak\nWRONG: a is gone\nverdict: FAILED")


# ---- transcripts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Daemon]:
    """One daemon for the planted faults."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as running:
        yield running


def transcript_of(daemon: Daemon, agent: str) -> Transcript:
    """An agent and what its client knows of it."""
    text = prose(300, agent)
    result = daemon.client.generate(agent, text, max_tokens=4)
    new = Transcript(agent, "text", (Claim.exactly(""),), absent=True, daemon_pid=daemon.pid)
    return new.answered(text + result.text, durable=True, daemon_pid=daemon.pid)


@pytest.mark.daemon
def test_a_true_transcript_is_found_true(daemon: Daemon) -> None:
    """What is known exactly, and what is one of several possibilities: the turn came to its end, or to nothing."""
    said = transcript_of(daemon, "true")
    text = said.text
    assert text is not None
    assert verify_agent(daemon.client, said, daemon_pid=daemon.pid) == said
    asked = said.unanswered(Claim(text, text + prose(20, "more"), grows=True))
    found = verify_agent(daemon.client, asked, daemon_pid=daemon.pid)
    assert found is not None
    assert found.text == text
    longer = text + prose(20, "more")
    daemon.client.generate("true", longer, max_tokens=8)
    found = verify_agent(daemon.client, asked, daemon_pid=daemon.pid)
    assert found is not None
    assert found.text == longer, "what nobody was told of is cut off"
    assert verify_agent(daemon.client, Transcript("nobody", absent=True), daemon_pid=daemon.pid) is None


@pytest.mark.daemon
@pytest.mark.parametrize("plant", ["other text", "shorter", "longer", "not there", "gone with the daemon"])
def test_a_planted_wrong_transcript_is_named(daemon: Daemon, plant: str) -> None:
    """A word changed in the middle, a turn that is missing, one too many, a lost agent, a lost durable turn."""
    said = transcript_of(daemon, f"wrong {plant}")
    text = said.text
    assert text is not None
    middle = len(text) // 2
    texts = {
        "other text": text[:middle] + ("X" if text[middle] != "X" else "Y") + text[middle + 1 :],
        "shorter": text[:-3],
        "longer": text + " and",
        "gone with the daemon": text + " and",
    }
    wrong = said.answered(texts.get(plant, text), durable=True, daemon_pid=daemon.pid)
    if plant == "not there":
        wrong = replace(wrong, agent="nobody")
    if plant == "gone with the daemon":
        wrong = replace(wrong, daemon_pid=1)
    with pytest.raises(Violation, match=wrong.agent):
        verify_agent(daemon.client, wrong, daemon_pid=daemon.pid)


@pytest.mark.daemon
def test_a_conversation_that_does_not_match_is_named(daemon: Daemon) -> None:
    """The stored answer differs from the one that the client was given, or less of it is there than was said."""
    question = {"role": "user", "content": prose(300, "question")}
    result = daemon.client.chat("chat", [question], max_tokens=8)
    answer = {"role": "assistant", "content": result.text}
    tokens = result.prompt_tokens + result.completion_tokens
    said = Transcript("chat", "chat").conversed((question, answer), tokens=tokens, durable=True, daemon_pid=daemon.pid)
    wrong_answer = {"role": "assistant", "content": "something else"}
    with pytest.raises(Violation, match="chat"):
        verify_agent(daemon.client, replace(said, messages=(question, wrong_answer)), daemon_pid=daemon.pid)
    with pytest.raises(Violation, match="stored tokens were reused"):
        verify_agent(daemon.client, replace(said, question="next", floor_tokens=tokens + 200), daemon_pid=daemon.pid)


# ---- the daemon at rest ---------------------------------------------------------------------------------------------


def figures_at_rest(**changed: Any) -> dict[str, Any]:
    """Statistics of a daemon at rest with two sealed pages and a tail in RAM."""
    pages = {str(state): 0 for state in PageState if state is not PageState.RELEASED}
    names = ("in_flight_bytes", "dirty_bytes", "reserved_bytes", "pinned_bytes", "load_failures", "write_failures")
    sums = {"frames": 3, "peak_budget_bytes": 10, "budget_bytes": 10, "pages": pages | {"clean": 2, "filling": 1}}
    return dict.fromkeys(names, 0) | sums | changed


def residency_at_rest() -> dict[str, Any]:
    """Page maps that fit: an agent and its fork share a page."""
    shared, own = {"page": "p1", "state": "clean"}, {"page": "p2", "state": "clean"}
    tail = {"tokens": 3, "state": "filling"}
    segments = [[{"pages": [shared, own], "tail": tail}], [{"pages": [shared], "tail": None}]]
    return {"agents": [{"branches": [{"segments": each}]} for each in segments]}


IDLE = {"running": 0, "queued": 0}


def test_a_daemon_at_rest_has_no_trouble() -> None:
    """A shared page is one frame."""
    assert check.trouble_with_figures(figures_at_rest(), IDLE, residency_at_rest()) == []
    assert check.is_at_rest(figures_at_rest(), IDLE)


@pytest.mark.parametrize(
    ("changed", "health", "word"),
    [
        ({"frames": 4}, {}, "frames leak"),
        ({"pages": {"clean": 3, "filling": 1, "lost": 0}, "frames": 4}, {}, "frames leak"),
        ({"pages": {"clean": 2, "filling": 1, "lost": 1}}, {}, "lost"),
        ({"reserved_bytes": 5}, {}, "reserved_bytes"),
        ({"pinned_bytes": 5}, {}, "pinned_bytes"),
        ({"write_failures": 1}, {}, "write_failures"),
        ({"peak_budget_bytes": 11}, {}, "budget"),
        ({}, {"running": 1}, "running"),
        ({}, {"queued": 2}, "queued"),
    ],
    ids=str,
)
def test_each_planted_leak_is_named(changed: dict[str, Any], health: dict[str, int], word: str) -> None:
    """A frame nobody maps, a page no agent has, a request that never ended, bytes that stay reserved (P21)."""
    troubles = check.trouble_with_figures(figures_at_rest(**changed), IDLE | health, residency_at_rest())
    assert len(troubles) == 1
    assert word in troubles[0]


# ---- the folder -----------------------------------------------------------------------------------------------------


def page_file(data_dir: Path, page: str = PAGE, *, size: int = 100) -> Path:
    """A file where a page's would be."""
    path = data_dir / FINGERPRINT / "swap" / page[:2] / f"{page}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return path


def test_planted_files_are_named(tmp_path: Path) -> None:
    """P5, P6: a page file that is counted nowhere, an unfinished one, what is left when every agent is gone."""
    counted = {"swap_bytes": 100, "log_bytes": 0, "disk_used_bytes": 100}
    path = page_file(tmp_path)
    assert check.trouble_with_bytes(counted, tmp_path) == []
    page_file(tmp_path, "cd" + "2" * 30, size=40)
    assert check.trouble_with_bytes(counted, tmp_path) == ["swap_bytes is 100, the files have 140"]
    big = {"swap_bytes": 140, "log_bytes": 0, "disk_used_bytes": 140 + (2 << 20)}
    assert "disk_used_bytes" in check.trouble_with_bytes(big, tmp_path)[0]
    gone = {"agents": 0, "frames": 0, "resident_bytes": 0, "swap_bytes": 0, "log_bytes": 0}
    troubles = check.trouble_when_empty(gone | {"frames": 2}, tmp_path)
    assert "frames is 2" in troubles[0]
    assert f"orphan file: {path}" in troubles
    notes = path.parent.parent.parent / "forks.log"  # stays when all forks are gone, and then holds nothing
    notes.write_bytes(b"")
    assert f"orphan file: {notes}" not in check.trouble_when_empty(gone, tmp_path)
    notes.write_bytes(b"note")
    assert f"orphan file: {notes}" in check.trouble_when_empty(gone, tmp_path)


@pytest.mark.daemon
def test_a_planted_orphan_and_a_flipped_bit_are_named(tiny_model_dir: Path, zygote: Zygote | None) -> None:
    """P4, P5: in the folder of a daemon that was stopped; without them there is nothing to say."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
        daemon.client.inject("a", prose(600, "a"))
        daemon.terminate()
        options = Options(daemon.data_dir, daemon.socket, folder, str(tiny_model_dir), deep=True)
        assert check.trouble_in_folder(options, notices=True) == []
        page = daemon.page_files()[0]
        orphan = page.parent.parent / "cd" / f"cd{'2' * 30}.safetensors"
        orphan.parent.mkdir(mode=0o700, exist_ok=True)
        orphan.write_bytes(page.read_bytes())
        orphan.chmod(0o600)
        named = [each for each in check.trouble_in_folder(options, notices=True) if "leftovers" in each]
        assert len(named) == 1
        after_a_kill = check.trouble_in_folder(options, notices=False)
        assert not [each for each in after_a_kill if "leftovers" in each], "after a kill an orphan may lie about"
        orphan.unlink()
        data = bytearray(page.read_bytes())
        data[-50] ^= 1
        page.write_bytes(data)
        assert any("deep" in each for each in check.trouble_in_folder(options, notices=False))


def test_a_log_that_tells_of_repairs_is_named() -> None:
    """One line for each kind of event, with its count; torn lines and what is normal say nothing."""
    lines = [
        '{"event": "request", "outcome": "ok"}',
        '{"event": "request_failed", "error": "x"}',
        '{"event": "request_failed", "error": "y"}',
        '{"event": "rea',
        "Traceback (most recent call last):",
    ]
    troubles = check.trouble_in_log(lines)
    assert len(troubles) == 2
    assert "request_failed 2 times" in troubles[0]
    assert check.trouble_in_log(lines[:1]) == []
