"""Agents move between real daemons as files: the same next tokens, and nothing half done after a `kill -9`."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from kvd_client import ConnectionLost, DaemonUnreachable, errors
from tests.support.daemon import Daemon, MakeDaemon, run_cli, short_folder
from tests.support.prose import prose
from tests.support.tiny_model import make_tiny_model
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

TOKENS = 900


def test_export_and_import_by_command(make_daemon: MakeDaemon) -> None:
    """P1 P14 P37: the file is private; the imported agent goes on like the original, its KV reused to the token."""
    here, there = make_daemon().start(), make_daemon().start()
    text = prose(TOKENS, "move")
    text += here.client.generate("a", text, max_tokens=8).text
    path = here.folder / "a.safetensors"
    told = here.cli("export", "a", str(path), "--json").json
    assert (told["tokens"], told["lost_tokens"]) == (TOKENS + 8, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.glob(".*.tmp")] == []
    done = here.cli("export", "a", str(path))
    assert done.code == 1
    assert "force" in done.stderr
    assert here.cli("export", "a", str(path), "--force").code == 0
    info = there.cli("import", str(path), "--as", "b", "--namespace", "n", "--json").json
    assert (info["agent"], info["namespace"], info["durable"]) == ("b", "n", True)
    there.restart()
    first = here.client.generate("a", text, max_tokens=16)
    second = there.client.generate("b", text, max_tokens=16, namespace="n")
    assert (second.text, second.match) == (first.text, "exact")
    assert second.cached_tokens == second.prompt_tokens - 1
    assert there.cli("import", str(path), "--as", "b", "--namespace", "n").code == 1
    assert there.cli("import", str(path)).stdout.startswith("a imported: ")


def test_another_model_is_refused(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """P7: a checkpoint of the same shape; both fingerprints are named. A link is not followed."""
    here, there = make_daemon().start(), make_daemon(model=make_tiny_model(tmp_path / "other", seed=5)).start()
    here.client.inject("a", prose(300, "other"))
    path = here.folder / "a.safetensors"
    here.client.export_agent("a", path)
    with pytest.raises(errors.Unsupported) as refused:
        there.client.import_agent(path)
    for daemon in (here, there):
        assert str(daemon.client.model_info()["fingerprint"]) in str(refused.value)
    link = here.folder / "link"
    link.symlink_to(path)
    with pytest.raises(errors.InvalidRequest, match="links are not followed"):
        here.client.import_agent(link, agent="b")
    with pytest.raises(errors.InvalidRequest, match="pipe, socket or device"):
        here.client.import_agent("/dev/null", agent="b")
    with pytest.raises(errors.InvalidRequest, match="data folder"):
        here.client.export_agent("a", here.data_dir / "x")
    with pytest.raises(errors.InvalidParams, match="absolute"):
        here.client.call("agent.export", {"agent": "a", "path": "x"})


@pytest.mark.parametrize("operation", ["export", "import", "replace"])
def test_kills_in_the_middle(tiny_model_dir: Path, operation: str, zygote: Zygote | None) -> None:
    """P3 P5: before the reply either nothing or all of it, after it all; no orphan, no unfinished file."""
    text = prose(2500, "kill")
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as daemon:
        daemon.client.inject("a", text)
        daemon.client.inject("b", prose(300, "old"))
        path = folder / "out" / "a.safetensors"
        path.parent.mkdir()
        if operation != "export":
            daemon.client.export_agent("a", path)
        tokens = daemon.client.agent_info("a").tokens
        for delay_s in (0.001, 0.004, 0.01, 0.02, None):
            replied = True
            name = "b" if operation == "replace" else "c"
            with daemon.new_client() as client:
                client.health()
                timer = threading.Timer(delay_s or 0.0, daemon.process.kill)
                try:
                    if delay_s is not None:
                        timer.start()
                    if operation == "export":
                        client.export_agent("a", path)
                    else:
                        client.import_agent(path, agent=name, replace=operation == "replace")
                except (ConnectionLost, DaemonUnreachable):
                    replied = False
                finally:
                    if timer.ident is not None:
                        timer.join()
                    daemon.kill()
            daemon.start()
            agents = {agent.agent: agent.tokens for agent in daemon.client.agents()}
            assert agents["a"] == tokens
            assert [each.name for each in path.parent.iterdir() if each.name != path.name] == []
            assert daemon.files("exports/*") == []
            if operation == "export":
                assert path.exists() or not replied
                if path.exists():
                    assert daemon.client.import_agent(path, agent="d").tokens == tokens
                    daemon.client.delete("d")
                    path.unlink()
                continue
            assert agents.get(name) in ((tokens,) if replied else (tokens, {"b": 300}.get(name)))
            named = {
                page["page"]
                for agent in daemon.client.residency()["agents"]
                for branch in agent["branches"]
                for segment in branch["segments"]
                for page in segment["pages"]
            }
            assert {each.stem for each in daemon.page_files()} == named
            if name in agents:
                daemon.client.delete(name)
            if operation == "replace":
                daemon.client.inject("b", prose(300, "old"))
        assert daemon.client.generate("a", text + " on", max_tokens=2).cached_tokens == tokens


def test_a_warm_folder(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """P1 P8: a name that the data folder lacks is found there when it is first used; the folder stays as it was."""
    here = make_daemon().start()
    text = prose(TOKENS, "warm")
    warm = tmp_path / "warm"
    warm.mkdir()
    for name in ("a", "b"):
        here.client.inject(name, text)
        here.client.export_agent(name, warm / f"{name}.safetensors")
    (warm / "readme.txt").write_text("not an agent")
    before = {path.name: path.read_bytes() for path in warm.iterdir()}
    warm.chmod(0o500)
    there = make_daemon("--warm-from", str(warm)).start()
    assert there.client.agents() == []
    first, second = (each.client.generate("a", text + " and", max_tokens=8) for each in (here, there))
    assert (second.text, second.cached_tokens) == (first.text, TOKENS)
    assert there.client.fork("b", "c").tokens == TOKENS
    there.restart()
    assert {agent.agent for agent in there.client.agents()} == {"a", "b", "c"}
    skipped = [line for line in there.log_lines() if line["event"] == "warm_file_skipped"]
    assert {Path(line["path"]).name for line in skipped} == {"readme.txt"}
    warm.chmod(0o700)
    assert {path.name: path.read_bytes() for path in warm.iterdir()} == before


def test_without_a_daemon_it_says_how_to_start_one(tmp_path: Path) -> None:
    """Exit code 3, as everywhere."""
    done = run_cli("--socket", str(tmp_path / "no.sock"), "export", "a", str(tmp_path / "f"))
    assert done.code == 3
    assert "kvd serve" in done.stderr
