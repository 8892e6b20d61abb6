"""`kvd-client` from a shell against a real daemon: every command, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, run_cli, run_kvd
from tests.support.prose import prose
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

END_FIELDS = {
    "text",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "match",
    "match_reason",
    "ttft_s",
    "durable",
    "agent",
}


def test_generate_ends_with_one_object(daemon: Daemon, tmp_path: Path) -> None:
    """P40: the documented fields with exact counts, for text given as an argument, as a file and on stdin."""
    text = prose(120, "cli")
    first = daemon.cli("generate", "cli", "--text", text, "--max-tokens", "5", "--json")
    assert (first.code, first.stderr) == (0, "")
    result = first.json
    assert set(result) >= END_FIELDS
    assert (result["agent"], result["match"], result["prompt_tokens"], result["durable"]) == ("cli", "new", 120, True)
    assert result["ttft_s"] > 0
    whole = text + result["text"]
    (tmp_path / "whole.txt").write_bytes(whole.encode())
    by_file = daemon.cli("--json", "generate", "cli", "--file", str(tmp_path / "whole.txt"), "--max-tokens", "3")
    assert by_file.json["match"] == "exact"
    assert by_file.json["cached_tokens"] == by_file.json["prompt_tokens"] - 1
    whole += by_file.json["text"]
    by_stdin = daemon.cli("generate", "cli", "-", "--max-tokens", "3", "--no-stream", "--json", stdin=whole + " and")
    assert by_stdin.json["match"] == "extend"
    assert by_stdin.json["ttft_s"] > 0


def test_generate_prints_the_text_and_a_summary(daemon: Daemon) -> None:
    """Without --json the new text alone is on stdout; what a person wants to know is on stderr."""
    done = daemon.cli("generate", "cli-text", "--text", prose(20, "plain"), "--max-tokens", "8")
    assert done.code == 0
    assert daemon.client.agent_info("cli-text").text_bytes == len((prose(20, "plain") + done.stdout).encode())
    assert "prompt 20 tokens, 0 reused" in done.stderr
    assert "durable" in done.stderr


def test_a_chat_goes_on_from_a_file(daemon: Daemon, tmp_path: Path) -> None:
    """The conversation is whole each time; the second turn reuses the first."""
    first = daemon.cli("chat", "cli-chat", "--system", "Be brief.", "--message", "hello", "--max-tokens", "4", "--json")
    assert first.json["match"] == "new"
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.json["text"]},
    ]
    (tmp_path / "history.json").write_text(json.dumps(history))
    arguments = ("--messages-file", str(tmp_path / "history.json"), "--message", "more", "--max-tokens", "4")
    second = daemon.cli("chat", "cli-chat", *arguments, "--json")
    assert (second.code, second.json["match"]) == (0, "extend")
    assert second.json["cached_tokens"] >= first.json["prompt_tokens"]


def test_commands_on_agents(daemon: Daemon) -> None:
    """inject, show, fork, rollback, pin, unpin, prefetch, evict, rm: the effect, and the agent's facts as JSON."""
    cli = daemon.cli
    injected = cli("inject", "tool", "--text", prose(300, "tool"), "--json").json
    assert (injected["tokens"], injected["appended_tokens"], injected["durable"]) == (300, 300, True)
    assert cli("show", "tool", "--json").json["computed_tokens"] == 300
    assert cli("fork", "tool", "tool-2", "--tokens", "100", "--json").json["tokens"] == 100
    assert cli("rollback", "tool-2", "40", "--json").json["tokens"] == 40
    assert cli("pin", "tool", "--json").json["pinned"] is True
    assert cli("unpin", "tool", "--json").json["pinned"] is False
    assert cli("evict", "tool", "--json").json["swapped_pages"] == 2
    assert cli("prefetch", "tool", "--json").json["agent"] == "tool"
    listed = cli("agents", "--json").json
    assert {"tool", "tool-2"} <= {agent["agent"] for agent in listed}
    assert cli("rm", "tool-2", "--json").json == {"agent": "tool-2", "deleted": True}
    gone = cli("show", "tool-2", "--json")
    assert gone.code == 1
    assert "agent_not_found" in gone.stderr
    table = cli("agents").stdout.splitlines()
    assert {"agent", "tokens", "format"} <= set(table[0].split())


def test_commands_on_the_daemon(daemon: Daemon) -> None:
    """stats, residency, health, model, tokenize print one JSON object each."""
    statistics = daemon.cli("stats", "--json").json
    assert {"budget_bytes", "resident_bytes", "peak_resident_bytes", "swap_bytes", "tokens_computed"} <= set(statistics)
    assert daemon.cli("residency", "--json").json["page_tokens"] == 256
    health = daemon.cli("health", "--json")
    assert (health.code, health.json["ready"], health.json["status"]) == (0, True, "ready")
    assert daemon.cli("model", "--json").json["context_tokens"] == 4096
    assert len(daemon.cli("tokenize", "--text", prose(9, "ids"), "--json").json["tokens"]) == 9


def test_exit_code_1_is_a_refusal_with_its_reason(daemon: Daemon) -> None:
    """The daemon refused: one line on stderr with the error's name, message and figures."""
    refused = daemon.cli("generate", "cli-long", "--text", prose(4096, "long"), "--json")
    assert refused.code == 1
    assert "context_full" in refused.stderr
    assert "context_tokens=4096" in refused.stderr
    assert refused.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "a"),
        ("generate", "a", "--text", "x", "--file", __file__),
        ("evaporate",),
        ("fork", "a"),
        ("chat", "a"),
    ],
)
def test_exit_code_2_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    """Wrong usage never reaches a daemon."""
    wrong = run_cli("--socket", "/nowhere/kvd.sock", *arguments)
    assert wrong.code == 2
    assert "Usage:" in wrong.stderr


def test_exit_code_3_names_the_command_that_starts_the_daemon(short_tmp: Path) -> None:
    """Nobody answers: the message says at which socket, and what to type."""
    folder = short_tmp / "no daemon here"
    unreachable = run_cli("health", "--data-dir", str(folder))
    assert unreachable.code == 3
    assert str(folder / "kvd.sock") in unreachable.stderr
    assert f"kvd serve --data-dir '{folder}'" in unreachable.stderr


def test_the_daemon_is_found_by_the_environment(daemon: Daemon) -> None:
    """KVD_SOCKET and KVD_DATA_DIR name the daemon; an option on the spot wins over both."""
    for environment in ({"KVD_SOCKET": str(daemon.socket)}, {"KVD_DATA_DIR": str(daemon.data_dir)}):
        assert run_cli("health", **environment).code == 0
    assert run_cli("health", "--data-dir", str(daemon.data_dir), KVD_SOCKET="/nowhere/kvd.sock").code == 0


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("100K", ["at least", "1000000", "100000"]),
        ("abc", ["'abc' is not a size", "40MB", "512MiB", "10.2GB"]),
        ("-5MB", ["not a size"]),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(
    short_tmp: Path, size: str, words: list[str], zygote: Zygote | None
) -> None:
    """P39: a small budget is refused with the minimum, a broken one with the allowed forms; no traceback."""
    folders = ("--data-dir", str(short_tmp / "data"), "--model", str(short_tmp))
    refused = run_kvd("serve", f"--budget={size}", *folders, zygote=zygote)
    assert refused.code == 2
    assert "budget" in refused.stderr
    assert all(word in refused.stderr for word in words), refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (short_tmp / "data").exists()


def test_a_model_that_is_not_there_is_named(short_tmp: Path, zygote: Zygote | None) -> None:
    """A missing model is one line and exit code 1; nothing is left in the data folder's place."""
    folders = ("--data-dir", str(short_tmp), "--model-dir", str(short_tmp))
    missing = run_kvd("serve", "--model", "no-such-model", *folders, zygote=zygote)
    assert missing.code == 1
    assert "no-such-model" in missing.stderr
    assert "Traceback" not in missing.stderr
