"""`kvd demo`: what kvd is for, in half a minute, on a real model with real kills.

Three agents read about 2,000 tokens each and answer (cold). Each is forked, and the fork gets the next question while
the daemon lives on: that is the unbroken run. Then the daemon is killed with `kill -9`, the page cache of its files is
dropped, a new one starts, and the originals get the same question: the answers must be equal, token for token, and all
computed tokens reused. Then a client is killed in the middle of a stream and its agent goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvd.bench.harness import UNSHARED, DaemonProcess, drop_page_cache, scratch_folder
from kvd.bench.text import technical_english
from kvd.errors import EnvironmentFault
from kvd.ops.sizes import format_size
from kvd_client import Client, GenerateResult
from kvd_client.residency import residency_lines

ROLES = {
    "coder": "You write Python. Use the notes below when you answer.",
    "reviewer": "You review Python code. Use the notes below when you answer.",
    "planner": "You plan work on a Python project. Use the notes below when you answer.",
}
FIRST_QUESTION = "Say in one sentence what these notes are about."
NEXT_QUESTION = "Which part of the notes matters most for you? One sentence."
PLAN = "Now write a long plan."
NOTES_TOKENS = 1_900
"""Notes of one agent; at most 45 % of a small model's context."""
ANSWER_TOKENS = 24
Messages = list[dict[str, str]]


@dataclass(slots=True)
class Check:
    """Something the demo promises, and whether it held."""

    name: str
    held: bool
    detail: str


@dataclass(slots=True)
class AgentFigures:
    """One agent's row: seconds to the first token and tokens reused, in each state."""

    agent: str
    context_tokens: int
    cold_s: float
    hot_s: float = 0.0
    warm_s: float = 0.0
    warm_cached_tokens: int = 0
    computed_tokens: int = 0


@dataclass(slots=True)
class DemoReport:
    """Everything the demo shows."""

    model: str = ""
    kv_format: str = ""
    attention: str = ""
    page_cache: str = ""
    ready_s: float = 0.0
    rows: list[AgentFigures] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        """Every promise held."""
        return all(check.held for check in self.checks)


def run_demo(*, model: str, options: Sequence[str], console: Console) -> DemoReport:
    """Run the demo; prints as it goes.

    Args:
        model: installed model.
        options: further `kvd serve` options.
        console: where to print.
    """
    report = DemoReport()
    began = time.monotonic()
    # an agent that resumes must not find what its unbroken fork computed
    options = (*UNSHARED, *options)
    with scratch_folder() as scratch, DaemonProcess(scratch / "data", model=model, options=options) as daemon:
        with daemon.client() as client:
            facts = client.model_info()
            report.model, report.kv_format = str(facts["model"]), str(facts["kv_format"])
            report.attention = str(facts["attention"])
            console.print(
                f"daemon {daemon.pid} serves [bold]{report.model}[/]; pages are {report.kv_format}, "
                f"{facts['token_bytes']} bytes a token ({100 * float(facts['fp16_ratio']):.0f} % of FP16)"
            )
            notes = _notes(client, min(NOTES_TOKENS, int(facts["context_tokens"] * 0.45)))
            talks = _cold(client, notes, report, console)
            unbroken = _unbroken(client, report, talks, console)
        _kill_and_restart(daemon, report, console)
        with daemon.client() as client:
            answers = _warm(client, report, talks, unbroken, console)
            _killed_client(daemon, client, report, _next_turn(talks["planner"], answers["planner"].text, PLAN), console)
            _show_residency(client, console)
            report.checks.append(_integrity(client))
        code = daemon.terminate()
        report.checks.append(Check("SIGTERM drains and exits 0", code == 0, f"exit code {code}"))
    report.seconds = round(time.monotonic() - began, 1)
    _show_table(report, console)
    return report


def _notes(client: Client, tokens: int) -> list[str]:
    """A different piece of technical English for each agent, about `tokens` tokens long."""
    english = technical_english()
    sample = english[: tokens * 4]
    characters = len(sample) * tokens // len(client.tokenize(sample))
    return [english[number * 30_000 :][:characters] for number in range(len(ROLES))]


def _cold(client: Client, notes: Sequence[str], report: DemoReport, console: Console) -> dict[str, Messages]:
    talks: dict[str, Messages] = {}
    for (agent, role), text in zip(ROLES.items(), notes, strict=True):
        messages: Messages = [
            {"role": "system", "content": f"{role}\n\n{text}"},
            {"role": "user", "content": FIRST_QUESTION},
        ]
        answer = client.chat(agent, messages, max_tokens=ANSWER_TOKENS)
        console.print(
            f"[cyan]{agent}[/] cold, {answer.prompt_tokens} tokens in {_ttft(answer):.2f} s: {_short(answer)}"
        )
        report.rows.append(AgentFigures(agent, answer.prompt_tokens, _ttft(answer)))
        talks[agent] = _next_turn(messages, answer.text, NEXT_QUESTION)
        info = client.agent_info(agent)
        report.rows[-1].computed_tokens = info.computed_tokens
        report.checks.append(Check(f"{agent}'s turn is durable", answer.durable, answer.durable_reason or "fsynced"))
    return talks


def _unbroken(
    client: Client, report: DemoReport, talks: Mapping[str, Messages], console: Console
) -> dict[str, GenerateResult]:
    answers: dict[str, GenerateResult] = {}
    for row in report.rows:
        client.fork(row.agent, f"{row.agent}-unbroken")
        answers[row.agent] = client.chat(f"{row.agent}-unbroken", talks[row.agent], max_tokens=ANSWER_TOKENS)
        row.hot_s = _ttft(answers[row.agent])
        console.print(f"[cyan]{row.agent}[/] hot (forked), first token in {row.hot_s:.3f} s")
    return answers


def _kill_and_restart(daemon: DaemonProcess, report: DemoReport, console: Console) -> None:
    pid = daemon.pid
    daemon.kill()
    report.page_cache = drop_page_cache(daemon.data_dir)
    report.ready_s = round(daemon.start(), 2)
    console.print(f"[red]kill -9 {pid}[/], page cache dropped; daemon {daemon.pid} was ready after {report.ready_s} s")


def _warm(
    client: Client,
    report: DemoReport,
    talks: Mapping[str, Messages],
    unbroken: Mapping[str, GenerateResult],
    console: Console,
) -> dict[str, GenerateResult]:
    answers: dict[str, GenerateResult] = {}
    for row in report.rows:
        answer = answers[row.agent] = client.chat(row.agent, talks[row.agent], max_tokens=ANSWER_TOKENS)
        row.warm_s, row.warm_cached_tokens = _ttft(answer), answer.cached_tokens
        console.print(f"[cyan]{row.agent}[/] warm, first token in {row.warm_s:.3f} s: {_short(answer)}")
        reused = f"{answer.cached_tokens} of {row.computed_tokens} computed tokens reused"
        report.checks.append(
            Check(f"{row.agent} resumes with every computed token", answer.cached_tokens == row.computed_tokens, reused)
        )
        same = answer.text == unbroken[row.agent].text
        report.checks.append(Check(f"{row.agent} answers as the unbroken run", same, _short(unbroken[row.agent])))
    return answers


def _killed_client(
    daemon: DaemonProcess, client: Client, report: DemoReport, messages: Messages, console: Console
) -> None:
    """Kill a `kvd-client` process while it streams; its agent keeps what was computed."""
    agent = "planner"
    before = client.agent_info(agent).computed_tokens
    command = [sys.executable, "-m", "kvd_client.cli", "chat", agent, "--socket", str(daemon.socket)]
    conversation = daemon.data_dir.with_name("conversation.json")
    conversation.write_text(json.dumps(messages))
    command += ["--messages-file", str(conversation), "--max-tokens", "400"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    seen = process.stdout.read(12).decode(errors="replace")
    process.kill()
    process.wait()
    process.stdout.close()
    _wait(client.health, lambda health: health.server["running"] == 0)
    info = client.agent_info(agent)
    console.print(
        f"[red]kill -9 {process.pid}[/] (a client, mid-stream after {seen!r}): {agent} keeps {info.computed_tokens} "
        f"computed tokens ({before} before)"
    )
    kept = info.durable and info.computed_tokens > before
    report.checks.append(Check("a killed client's agent keeps its tokens", kept, f"{before} -> {info.computed_tokens}"))
    answer = client.chat(agent, messages, max_tokens=8)
    # the same prompt again: all of it is there; one token is run again for its logits
    resumed = answer.cached_tokens == answer.prompt_tokens - 1
    report.checks.append(
        Check("and resumes from there", resumed, f"{answer.cached_tokens} of {answer.prompt_tokens} reused")
    )


def _wait(read: Callable[[], Any], until: Callable[[Any], bool], timeout_s: float = 30.0) -> Any:  # noqa: ANN401
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = read()
        if until(value):
            return value
        time.sleep(0.05)
    raise EnvironmentFault(f"nothing happened for {timeout_s:g} s")


def _integrity(client: Client) -> Check:
    stats = client.statistics()
    lost = int(str(stats.server["load_failures"]))
    within = stats.peak_resident_bytes <= stats.budget_bytes
    return Check(
        "no page lost, budget kept", lost == 0 and within, f"{lost} lost, peak {format_size(stats.peak_resident_bytes)}"
    )


def _next_turn(messages: Messages, answer: str, question: str) -> Messages:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def _ttft(answer: GenerateResult) -> float:
    if answer.ttft_s is None:
        raise EnvironmentFault("the daemon sent no token")
    return answer.ttft_s


def _short(answer: GenerateResult) -> str:
    text = " ".join(answer.text.split())
    return escape(text if len(text) <= 70 else text[:69] + "…")


def _show_residency(client: Client, console: Console) -> None:
    console.print()
    for line in residency_lines(client.residency()):
        console.print(line, markup=False)


def _show_table(report: DemoReport, console: Console) -> None:
    table = Table(title="time to first token, client's clock; warm is after kill -9", box=box.SIMPLE)
    for column in ("agent", "tokens", "cold", "hot", "warm", "cold/hot", "cold/warm"):
        table.add_column(column, justify="left" if column == "agent" else "right")
    for row in report.rows:
        table.add_row(
            row.agent,
            str(row.context_tokens),
            f"{row.cold_s:.2f} s",
            f"{row.hot_s:.3f} s",
            f"{row.warm_s:.3f} s",
            f"{row.cold_s / row.hot_s:.0f}x",
            f"{row.cold_s / row.warm_s:.0f}x",
        )
    console.print(table)
    for check in report.checks:
        mark = "[green]ok[/]" if check.held else "[red]NOT HELD[/]"
        console.print(f"  {mark} {check.name} ({check.detail})")
    console.print(f"{report.seconds:.0f} s in all; page cache dropped by {report.page_cache}")


def report_facts(report: DemoReport) -> dict[str, object]:
    """Plain data for `--json`."""
    return asdict(report) | {"held": report.held}
