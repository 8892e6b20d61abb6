"""Run a soak: a daemon of its own, client processes that come, misbehave and die, and everything that is checked.

Theory of operation. Each slot has a shelf of transcripts and one client process at a time; a client that killed itself
is replaced, and its successor takes over the shelf. The daemon may be killed and started again meanwhile. When the time
is over the clients are told to stop, and the checks follow, from the gentlest to the one that destroys everything: the
daemon at rest; every transcript; continuations before and after eviction; `kill -9`, the folder as it lies there, a
restart, every transcript and continuation again; a graceful stop, the folder again, every checksum; a last daemon in
which everything is deleted, after which nothing may be left.

May import anything of kvd and kvd_client.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from kvd.bench import soak_check as check
from kvd.bench.harness import DaemonProcess
from kvd.bench.soak_client import VIOLATED, ClientSettings
from kvd.bench.soak_transcript import Shelf, Transcript
from kvd.bench.soak_verify import Violation, verify_agent
from kvd.bench.soak_watch import Growth, Sample, growth_of, longest_life, trouble_at_rest
from kvd.bench.text import technical_english
from kvd.doctor import Options
from kvd.errors import EnvironmentFault
from kvd_client import Client, KvdClientError

SAMPLE_S: Final = 0.5
POLL_S: Final = 0.05
REST_S: Final = 120.0
"""How long a daemon may take to come to rest, and to delete what was forgotten."""

STOP_S: Final = 150.0
"""How long a client may take to finish the request it is in."""

CONTINUED: Final = 6
"""Agents whose continuation is compared before and after eviction and restart."""

NEW_TOKENS: Final = 12
POOL_THREADS: Final = min(32, (os.cpu_count() or 1) + 4) + 2
"""Threads that the daemon's pool for encoding and templates keeps once they were needed, and two to spare."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """What to do.

    Attributes:
        seconds: that clients work.
        clients: processes at a time.
        seed: of everything that is drawn.
        model: what `kvd serve --model` gets.
        model_dir: folder of installed models.
        options: further options of `kvd serve`.
        kill_daemon_every_s: the daemon is killed so long after it was ready; None: never.
        agents: each client keeps at most so many.
        longest_tokens: of an agent, about.
    """

    seconds: float
    clients: int
    seed: int
    model: str
    model_dir: Path
    options: Sequence[str] = ()
    kill_daemon_every_s: float | None = None
    agents: int = 5
    longest_tokens: int = 1200


@dataclass(slots=True)
class SoakReport:
    """What came of it.

    Attributes:
        troubles: what is wrong, one line each; empty when all held.
        seconds: that clients worked.
        done: what clients did, by kind and outcome.
        turns: answered turns; `completion_tokens`, `prompt_tokens`, `cached_tokens` are theirs.
        tokens_s: new tokens a second, of all clients together.
        daemon_kills: `kill -9` of the daemon, the last one of the checks included.
        client_kills: clients that killed themselves in the middle of a request.
        verified: agents held to their transcripts, by clients and at the end.
        continued: continuations compared.
        peak_footprint_bytes: the most a daemon took.
        growth: of the daemon that lived longest, beside pages; None when it lived too short to say.
        open_files, threads: of the daemon, at first and at rest.
        figures: the daemon's statistics at rest.
    """

    troubles: list[str] = field(default_factory=list)
    seconds: float = 0.0
    done: dict[str, int] = field(default_factory=dict)
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens_s: float = 0.0
    daemon_kills: int = 0
    client_kills: int = 0
    verified: int = 0
    continued: int = 0
    peak_footprint_bytes: int = 0
    growth: Growth | None = None
    open_files: tuple[int, int] = (0, 0)
    threads: tuple[int, int] = (0, 0)
    figures: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, object]:
        """Plain data for `--json`."""
        return {"verdict": "failed" if self.troubles else "passed"} | asdict(self)


class Soak:
    """One soak. Owner: the main thread. Every process it starts is ended on the way out.

    Args:
        plan: what to do.
        folder: private; data folder, log, shelves are made inside.
        tell: progress, one line each.
    """

    def __init__(self, plan: SoakPlan, folder: Path, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = folder
        self._tell = tell
        options = ("--check", "--model-dir", str(plan.model_dir), *plan.options)
        self.daemon = DaemonProcess(folder / "data", model=plan.model, options=options)
        self._slots: dict[int, subprocess.Popen[bytes]] = {}
        self._generation: Counter[int] = Counter()
        self._lives: list[list[Sample]] = []
        self._witness = ""
        self.report = SoakReport()

    def run(self) -> SoakReport:
        """Do everything. A fault of the daemon ends up in the report's `troubles`; only a start that fails raises.

        Raises:
            EnvironmentFault: the first daemon does not start.
        """
        try:
            self._start_daemon()
            self._guarded("the witness", self._make_witness)
            self._work()
            self._guarded("the end", self._examine)
        finally:
            self._stop_clients(kill=True)
            self.daemon.kill()
        self._add_up()
        return self.report

    def _guarded(self, what: str, function: Callable[[], None]) -> None:
        try:
            function()
        except (Violation, KvdClientError, EnvironmentFault, subprocess.TimeoutExpired) as error:
            self._trouble(f"{what}: {type(error).__name__}: {error}")

    def _trouble(self, *lines: str) -> None:
        self.report.troubles.extend(lines)
        for line in lines:
            self._tell(f"WRONG: {line}")

    # ---- processes --------------------------------------------------------------------------------------------------

    def _start_daemon(self) -> None:
        self.daemon.start()
        self._lives.append([])
        self._sample()

    def _kill_daemon(self) -> None:
        self.daemon.kill()
        self.report.daemon_kills += 1

    def _stop_daemon(self) -> None:
        if (code := self.daemon.terminate()) != 0:
            self._trouble(f"the daemon ended with {code} when it was told to stop")

    def _sample(self) -> Sample | None:
        try:
            with self.daemon.client() as client:
                sample = Sample.of(client.call("statistics"), time.monotonic())
        except KvdClientError:
            return None
        self._lives[-1].append(sample)
        return sample

    def _start_client(self, slot: int) -> None:
        self._generation[slot] += 1
        settings = ClientSettings(
            socket=str(self.daemon.socket),
            folder=str(self._shelf(slot)),
            slot=slot,
            seed=f"{self._plan.seed}-{slot}-{self._generation[slot]}",
            agents=self._plan.agents,
            longest_tokens=self._plan.longest_tokens,
            survives_kills=self._plan.kill_daemon_every_s is not None,
        )
        command = [sys.executable, "-m", "kvd.bench.soak_client", settings.to_json()]
        with (self._folder / f"client-{slot}.log").open("ab") as log:
            self._slots[slot] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _shelf(self, slot: int) -> Path:
        return self._folder / "shelves" / str(slot)

    def _stop_clients(self, *, kill: bool = False) -> None:
        for process in self._slots.values():
            process.kill() if kill else process.terminate()
        deadline = time.monotonic() + STOP_S
        for slot, process in self._slots.items():
            try:
                self._client_ended(slot, process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self._trouble(f"client {slot} was not answered within {STOP_S:g} s")
        self._slots.clear()

    def _client_ended(self, slot: int, code: int) -> None:
        if code == VIOLATED:
            entries = [entry for entry in Shelf(self._shelf(slot)).journal() if entry["event"] == "violation"]
            self._trouble(*(f"client {slot}: {entry['text']}" for entry in entries))
        elif code not in (0, -signal.SIGKILL, -signal.SIGTERM):  # one may be told to stop before it can listen
            self._trouble(f"client {slot} ended with {code}; see its log")

    # ---- the work ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        plan = self._plan
        began_s = time.monotonic()
        for slot in range(plan.clients):
            self._start_client(slot)
        sampled_s = born_s = told_s = time.monotonic()
        while (now := time.monotonic()) - began_s < plan.seconds and not self.report.troubles:
            time.sleep(POLL_S)
            for slot, process in list(self._slots.items()):
                if (code := process.poll()) is not None:
                    self._client_ended(slot, code)
                    self._start_client(slot)
            if now - sampled_s >= SAMPLE_S:
                sampled_s = now
                self._sample()
            if plan.kill_daemon_every_s is not None and now - born_s >= plan.kill_daemon_every_s:
                self._kill_daemon()
                self._guarded("a start after kill -9", self._start_daemon)
                born_s = time.monotonic()
            if now - told_s >= 10.0:
                told_s = now
                taken = self._lives[-1][-1].footprint_bytes / 1e6 if self._lives[-1] else 0.0
                self._tell(f"{now - began_s:5.0f} s, {taken:.0f} MB, {self.report.daemon_kills} kills")
        self._stop_clients()
        self.report.seconds = round(time.monotonic() - began_s, 1)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _examine(self) -> None:
        with self.daemon.client() as client:
            self._tell("at rest")
            self._unpin_all(client)
            if not self._eventually(lambda: self._is_at_rest(client)):
                self._trouble(f"the daemon does not come to rest within {REST_S:g} s")
            self._check_at_rest(client)
            self._tell("transcripts")
            self._verify_all(client)
            continued = self._continuations(client)
            for agent in continued:
                client.evict(agent)
            self._compare(client, continued, "after eviction")
            self._check_witness(client)
        self._kill_daemon()
        self._tell("after kill -9")
        self._trouble(*check.trouble_in_folder(self._doctor(), notices=False))
        self._start_daemon()
        with self.daemon.client() as client:
            self._verify_all(client)
            self._compare(client, continued, "after kill -9")
            self._check_witness(client)
            self._eventually(lambda: self._is_at_rest(client))
        self._stop_daemon()
        self._tell("after a graceful stop")
        self._trouble(*check.trouble_in_folder(self._doctor(), notices=True))
        self._start_daemon()
        with self.daemon.client() as client:
            self._tell("deleting everything")
            self._check_bytes(client)
            for info in client.agents():
                client.delete(info.agent)
            self._eventually(lambda: not self._trouble_when_empty(client))
            self._trouble(*self._trouble_when_empty(client))
        self._stop_daemon()
        self._trouble(*check.trouble_in_folder(self._doctor(), notices=True))
        self._trouble(*check.trouble_in_log(self.daemon.log.read_text(errors="replace").splitlines()))

    def _eventually(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + REST_S
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _is_at_rest(self, client: Client) -> bool:
        durable = all(info.durable for info in client.agents())
        return durable and check.is_at_rest(client.call("statistics"), client.call("health"))

    def _check_bytes(self, client: Client) -> None:
        """Books and files agree, once no file is let go of between the two looks: that is done when nothing else is."""
        found: list[str] = []

        def agree() -> bool:
            found[:] = check.trouble_with_bytes(client.call("statistics"), self.daemon.data_dir)
            return not found

        self._eventually(agree)
        self._trouble(*found)

    def _trouble_when_empty(self, client: Client) -> list[str]:
        return check.trouble_when_empty(client.call("statistics"), self.daemon.data_dir)

    def _unpin_all(self, client: Client) -> None:
        for info in client.agents():
            if info.pinned:
                client.unpin(info.agent)

    def _check_at_rest(self, client: Client) -> None:
        figures = client.call("statistics")
        self.report.figures = figures
        self._trouble(*check.trouble_with_figures(figures, client.call("health"), client.residency()))
        self._check_bytes(client)
        first, last = self._lives[0][0], self._sample()
        if last is not None:
            self.report.open_files = (first.open_files, last.open_files)
            self.report.threads = (first.threads, last.threads)
            self._trouble(*trouble_at_rest(first, last, allowed_threads=POOL_THREADS))

    def _verify_all(self, client: Client) -> None:
        for slot in range(self._plan.clients):
            shelf = Shelf.open(self._shelf(slot))
            for transcript in list(shelf.transcripts.values()):
                try:
                    found = verify_agent(client, transcript, daemon_pid=self.daemon.pid)
                except Violation as violation:
                    self._trouble(f"client {slot}'s {violation}")
                    continue
                self.report.verified += 1
                if found is None:
                    shelf.forget(transcript.agent)
                else:
                    shelf.put(found)

    # ---- continuations ----------------------------------------------------------------------------------------------

    def _continuations(self, client: Client) -> dict[str, tuple[str, str]]:
        """Text and greedy continuation of some agents, which are left as they were."""
        found: dict[str, tuple[str, str]] = {}
        for slot in range(self._plan.clients):
            for transcript in self._known(slot)[: max(1, CONTINUED // self._plan.clients)]:
                assert transcript.text is not None
                found[transcript.agent] = (transcript.text, self._continue(client, transcript.agent, transcript.text))
        return found

    def _known(self, slot: int) -> list[Transcript]:
        shelf = Shelf.open(self._shelf(slot))
        return [each for each in shelf.transcripts.values() if each.kind == "text" and each.text]

    def _continue(self, client: Client, agent: str, text: str) -> str:
        """The next tokens; alone, from KV that is all there, so that the same steps give the same tokens."""
        tokens = client.agent_info(agent).tokens
        result = client.generate(agent, text, max_tokens=NEW_TOKENS, on_context_full="stop")
        client.rollback(agent, tokens)
        self.report.continued += 1
        if result.match != "exact" or result.cached_tokens != tokens - 1:
            self._trouble(f"{agent} reused {result.cached_tokens} of {tokens} tokens ({result.match_reason})")
        return result.text

    def _compare(self, client: Client, continued: dict[str, tuple[str, str]], when: str) -> None:
        for agent, (text, before) in continued.items():
            now = self._continue(client, agent, text)
            if now != before:
                self._trouble(f"{agent} continued with {before!r}, and {when} with {now!r}")

    def _make_witness(self) -> None:
        """An agent computed alone by a fresh daemon; the same steps must give the same tokens whenever they are run.

        It goes at once: an agent with its text would begin with its pages instead of running the steps.
        """
        with self.daemon.client() as client:
            self._witness = self._witness_text(client, "witness")
            client.delete("witness")

    def _witness_text(self, client: Client, agent: str) -> str:
        prompt = technical_english()[5000:8000]
        return client.generate(agent, prompt, max_tokens=NEW_TOKENS).text

    def _check_witness(self, client: Client) -> None:
        if (again := self._witness_text(client, "fresh")) != self._witness:
            self._trouble(f"a fresh agent answers {again!r}, and before the soak {self._witness!r}")
        client.delete("fresh")

    # ---- the report -------------------------------------------------------------------------------------------------

    def _doctor(self) -> Options:
        return Options(
            data_dir=self.daemon.data_dir.resolve(),
            socket=self.daemon.socket,
            model_dir=self._plan.model_dir,
            model=self._plan.model,
            deep=True,
        )

    def _add_up(self) -> None:
        report = self.report
        done: Counter[str] = Counter()
        for slot in range(self._plan.clients):
            for entry in Shelf(self._shelf(slot)).journal():
                event = entry["event"]
                if event == "answered":
                    report.turns += 1
                    report.prompt_tokens += entry["prompt_tokens"]
                    report.cached_tokens += entry["cached_tokens"]
                    report.completion_tokens += entry["completion_tokens"]
                else:
                    report.verified += event == "verified"
                    report.client_kills += event == "died"
                    done[" ".join(filter(None, (event, entry.get("outcome"))))] += 1
        report.done = dict(sorted(done.items()))
        report.tokens_s = round(report.completion_tokens / max(report.seconds, 0.001), 1)
        samples = [sample for life in self._lives for sample in life]
        report.peak_footprint_bytes = max((sample.footprint_bytes for sample in samples), default=0)
        report.growth = growth_of(longest_life(self._lives))
        if report.growth is not None and report.growth.trouble:
            self._trouble(report.growth.trouble)


__all__ = ["Soak", "SoakPlan", "SoakReport"]
