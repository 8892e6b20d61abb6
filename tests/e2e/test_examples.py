"""The examples run as they are, each in a process of its own, and show what they say they show."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from tests.support.daemon import Daemon, daemon_environment

pytestmark = pytest.mark.daemon

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NODE_PACKAGES = platformdirs.user_cache_path("kvd-tests", appauthor=False) / "node"


@pytest.fixture(scope="module")
def environment(daemon: Daemon) -> dict[str, str]:
    """What a process needs to find the daemon."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")))
    return daemon_environment(KVD_SOCKET=str(daemon.socket), PYTHONPATH=path)


def _run(command: list[str], environment: dict[str, str], cwd: Path = ROOT) -> str:
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_example_is_listed_and_run() -> None:
    """No file beside those of the README and of these tests."""
    readme = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"chat.py", "tools.py", "many_agents.py", "injection.py", "monitoring.py"}
    assert all(f"[{name}]({name})" in readme for name in names)


def test_chat(environment: dict[str, str]) -> None:
    """The second turn, and the second run, find their prompts computed."""
    first = _run([sys.executable, str(EXAMPLES / "chat.py"), "chat-a"], environment)
    assert [line.split(":")[0] for line in first.splitlines() if line.startswith("[")] == ["[new", "[extend"]
    again = _run([sys.executable, str(EXAMPLES / "chat.py"), "chat-a"], environment)
    counts = [line.split(": ")[1].split() for line in again.splitlines() if line.startswith("[")]
    assert all(int(count[0]) > 0 for count in counts)


def test_tools(environment: dict[str, str]) -> None:
    """P17: a call is made and answered; the turn with its result extends, and the answer has its form."""
    called, answer, reused = _run([sys.executable, str(EXAMPLES / "tools.py")], environment).splitlines()
    assert called in ("temperature(Paris) -> 18", "temperature(Rome) -> 24")
    assert sorted(json.loads(answer)) == ["celsius", "city"]
    assert reused.startswith("[extend: ")


def test_many_agents(environment: dict[str, str]) -> None:
    """Four processes; all but the one that computes them reuse the shared prompt's whole pages."""
    said = _run([sys.executable, str(EXAMPLES / "many_agents.py"), "4"], environment)
    reused = [int(line.split(": ")[1].split()[0]) for line in said.splitlines()]
    assert len(reused) == 4
    assert sum(count >= 256 for count in reused) == 3


def test_injection(environment: dict[str, str]) -> None:
    """What was injected is there when the turn comes."""
    said = _run([sys.executable, str(EXAMPLES / "injection.py")], environment).splitlines()
    assert len(said) == 3
    appended = int(said[0].split(": ")[1].split()[0])
    assert appended > 10
    assert int(said[2].split(": ")[1].split()[0]) >= appended - 1


def test_monitoring(environment: dict[str, str], daemon: Daemon) -> None:
    """Every agent is named, with its pages; then what happens to one, with the text that its prompt left."""
    daemon.client.inject("watched", "words " * 300)
    said = _run([sys.executable, str(EXAMPLES / "monitoring.py")], environment)
    assert "status ready, ready True" in said
    assert "watched: " in said
    assert re.search(r"default/watched: idle, \d+ tokens, \d of \d pages in RAM, 0 shared", said)
    assert "miss: no stored text" in said
    assert "got 'And then?'" in said
    assert re.search(r"eviction: [1-9] pages, [1-9][\d,]+ bytes", said)


def test_a_client_in_another_language(environment: dict[str, str], tmp_path: Path) -> None:
    """Node.js, docs/protocol.md and a msgpack package: calls, streams, cancellation and errors."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("no Node.js with npm here (Debian: apt install nodejs npm)")
    if not (NODE_PACKAGES / "node_modules" / "@msgpack" / "msgpack").exists():
        NODE_PACKAGES.mkdir(parents=True, exist_ok=True)
        shutil.copy(EXAMPLES / "node" / "package.json", NODE_PACKAGES)
        got = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund"],
            cwd=NODE_PACKAGES,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if got.returncode != 0:
            pytest.skip(f"the msgpack package cannot be had from the package registry: {got.stderr[-200:]}")
    for name in ("kvd.mjs", "chat.mjs", "package.json"):
        shutil.copy(EXAMPLES / "node" / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(NODE_PACKAGES / "node_modules")
    said = _run([node, "chat.mjs", "node", environment["KVD_SOCKET"]], environment, tmp_path)
    first, second, cancelled, unknown = map(json.loads, said.splitlines())
    assert (first["match"], second["match"]) == ("new", "extend")
    assert second["cached"] >= first["prompt"]
    assert first["durable"] is True
    assert cancelled == {"error": "cancelled", "code": 190}
    assert unknown == {"error": "agent_not_found", "code": 110}
