"""`kvd bench serve`: figures computed right from given times and counters, and the command over a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.bench.cli import bench
from kvd.bench.serve import figures_of
from kvd.bench.serve_client import AgentProcess
from kvd.bench.serve_figures import (
    Figure,
    SwapSeconds,
    Turn,
    chunk_s,
    decode_floor_tokens_s,
    decode_tokens_s,
    engine_share,
    first_tokens_in_chunks,
    hidden_share,
    middle,
    ratio,
    share_beside,
    swap_seconds,
    texts_per_s,
    whole_tokens_s,
)
from kvd.bench.serve_reference import BatchSpeed
from kvd.bench.serve_runs import Beside, Prompts, Sizes, Together
from kvd.bench.serve_swap import SwapRun, swap_budget_bytes
from kvd.errors import EnvironmentFault, InvalidParams
from kvd.model.tokenizer import TextCodec


def turn(*, sent: float = 0.0, first: float | None = 1.0, texts: tuple[float, ...] = (), **more: object) -> Turn:
    """A turn whose tokens are its texts."""
    made = Turn(sent, first, texts, chunks_s=(), tokens=len(texts), server={})
    return replace(made, **more)  # type: ignore[arg-type]


def test_tokens_a_second_of_one_and_of_several() -> None:
    """From the earliest first token to the last of all; the first token of each came of its prompt."""
    one = turn(first=1.0, texts=(1.0, 1.5, 2.0, 3.0))
    assert decode_tokens_s([one]) == pytest.approx(3 / 2)
    late = turn(first=2.0, texts=(2.0, 4.0, 5.0))
    assert decode_tokens_s([one, late]) == pytest.approx((3 + 2) / 4)
    assert whole_tokens_s([one, late]) == pytest.approx((4 + 3) / 5)
    assert decode_tokens_s([one, turn(first=None)]) is None
    assert decode_tokens_s([turn(texts=(1.0,))]) is None, "no time has passed"
    assert decode_tokens_s([]) is whole_tokens_s([]) is None


def test_the_daemon_counts_tokens_not_the_pieces_of_text() -> None:
    """A token inside a character brings no text; it counts all the same."""
    assert decode_tokens_s([turn(first=1.0, texts=(1.0, 3.0), tokens=9)]) == pytest.approx(8 / 2)


def test_a_share_beside_a_prefill_is_of_the_rate_before_it() -> None:
    """Two texts a second alone after the settling ones, one while the other reads."""
    times = (0.1, 0.2, *(1 + i / 2 for i in range(8)), 6.0, 7.0, 8.0, 9.0, 9.5)
    decoder = turn(texts=times)
    reader = turn(sent=5.0, first=9.0)
    assert texts_per_s(decoder, 1.0, 5.0) == pytest.approx(7 / 4)
    assert share_beside(decoder, reader, settled=2) == pytest.approx((4 / 4) / (7 / 4))
    assert share_beside(decoder, turn(sent=5.0, first=None), settled=2) is None
    assert share_beside(decoder, reader, settled=99) is None
    assert texts_per_s(decoder, 2.0, 2.0) is None


def test_waits_are_counted_in_chunks_that_nobody_shared() -> None:
    """A chunk beside which somebody was served is longer and is no unit; requests after the prompt do not count."""
    prompt = turn(first=9.0, chunks_s=(1.0, 2.0, 3.1, 6.0, 7.2))
    short = [turn(sent=3.5, first=5.0), turn(sent=9.5, first=9.6), turn(sent=8.0, first=None)]
    assert chunk_s(prompt, short) == pytest.approx(1.1)
    assert first_tokens_in_chunks(short, prompt) == pytest.approx((1.5 / 1.1,))
    assert first_tokens_in_chunks(short, turn(chunks_s=(1.0,))) == ()
    assert chunk_s(turn(), ()) is None


def test_shares_of_time() -> None:
    """The engine's own is what neither model nor sampler took; nothing measured gives no share."""
    before = {"engine_busy_s": 1.0, "forward_s": 0.5, "sampling_s": 0.1}
    after = {"engine_busy_s": 3.0, "forward_s": 2.3, "sampling_s": 0.2}
    assert engine_share(before, after) == pytest.approx(0.05)
    assert engine_share(before, before) is None
    assert hidden_share(busy_s=2.0, exposed_s=0.5) == 0.75
    assert hidden_share(busy_s=0.0, exposed_s=0.0) is None


def test_swapping_in_is_what_the_daemon_counts() -> None:
    """Reading and waiting between two statistics."""
    begun = {"swap_in_busy_s": 1.0, "swap_in_exposed_s": 0.25, "swap_in_waited_s": 0.5}
    ended = {"swap_in_busy_s": 4.0, "swap_in_exposed_s": 0.5, "swap_in_waited_s": 1.0}
    assert swap_seconds(begun, ended) == SwapSeconds(busy_s=3.0, exposed_s=0.25, waited_s=0.5)


def test_the_floor_reads_weights_once_and_pages_of_each_row() -> None:
    """Eight rows share the weights, not the pages."""
    arguments = {"weight_bytes": 100.0, "page_bytes": 10.0, "read_bytes_s": 1000.0}
    assert decode_floor_tokens_s(rows=1, **arguments) == pytest.approx(1000 / 110)
    assert decode_floor_tokens_s(rows=8, **arguments) == pytest.approx(8000 / 180)


def test_figures_without_a_value_have_no_verdict() -> None:
    """At least and at most both include the bar itself."""
    figure = Figure("x", 3.0, 3.0, "at least", None, "")
    assert figure.met is replace(figure, sense="at most").met is True
    assert replace(figure, value=2.9).met is replace(figure, value=3.1, sense="at most").met is False
    assert replace(figure, value=None).met is None
    assert middle([None, 3.0, 1.0, 2.0]) == 2.0
    assert middle([None]) is ratio(1.0, None) is ratio(None, 1.0) is ratio(1.0, 0.0) is None


def test_every_figure_stands_beside_its_bar() -> None:
    """Nine figures of runs that are given, each with the bar it is asked for, and ratios of the right things."""
    together = Together(one=[10.0], all=[40.0], whole=[6.0], engine_one=[0.01], engine_all=[0.06])
    some, none = SwapSeconds(1.0, 0.1, 0.2), SwapSeconds(0.0, 0.0, 0.0)
    swap = {"in turn": SwapRun(0.9, some, 64, 9), "in line": SwapRun(None, none, 0, 9)}
    figures = figures_of(Sizes(), together, Beside([0.5], [1.5, 1.0, 3.0]), swap, BatchSpeed(20.0, 8.0), (20.0, 100.0))
    assert [(figure.value, figure.bar, figure.met) for figure in figures] == [
        (4.0, 3.0, True),
        (0.5, 0.4, True),
        (1.5, 2.0, True),
        (0.9, 0.7, True),
        (None, 0.7, None),
        (0.01, 0.05, True),
        (0.06, 0.05, False),
        (2.0, 1.0, True),
        (0.75, 1.0, False),
    ]
    assert figures[0].floor == 5.0
    assert len({figure.name for figure in figures}) == len(figures)


def test_prompts_differ_and_are_as_long_as_asked(tiny_model_dir: Path) -> None:
    """Each agent has a text of its own; nothing that ends a text is allowed to end one early."""
    prompts = Prompts(TextCodec.from_folder(tiny_model_dir))
    texts = [prompts.text(number, 200) for number in range(8)]
    assert len(set(texts)) == 8
    assert all(abs(len(prompts.codec.encode_content(text)) - 200) <= 1 for text in texts)
    assert set(prompts.ban) == {str(token) for token in prompts.codec.eos_ids}
    with pytest.raises(InvalidParams, match="fewer than"):
        prompts.text(0, 10_000_000)


def test_the_budget_of_the_swap_run_holds_two_agents_and_not_three() -> None:
    """In whole pages, as long as the agents are in the end."""
    sizes = Sizes(long_tokens=4096, new_tokens=64)
    assert 2 * 4096 * 100 < swap_budget_bytes(sizes, token_bytes=100) < 3 * (4096 + 1024) * 100


def test_a_client_that_cannot_reach_its_daemon_says_so(tmp_path: Path) -> None:
    """The benchmark fails with a reason, and does not wait for events that never come."""
    with pytest.raises(EnvironmentFault, match=r"a client's call failed: .*nobody\.sock"):
        AgentProcess(tmp_path / "nobody.sock")


@pytest.mark.long
@pytest.mark.daemon
def test_the_command_reports_every_figure(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One JSON object: what was run, each figure with its bar, and what the figures are made of."""
    monkeypatch.setenv("KVD_THREADS", "1")
    sizes = ["--agents", "2", "--tokens", "64", "--new-tokens", "16", "--long-tokens", "1024", "--repeats", "1"]
    result = CliRunner().invoke(bench, ["serve", *sizes, "--model", str(tiny_model_dir), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["sizes"] == {"agents": 2, "tokens": 64, "new_tokens": 16, "long_tokens": 1024, "repeats": 1}
    assert len(report["figures"]) == 9
    assert {"name", "value", "bar", "sense", "met", "floor", "note"} <= set(report["figures"][0])
    together = report["together"]
    assert min(together["one"][0], together["all"][0], together["whole"][0]) > 0
    assert 0 < together["engine_one"][0] < 1
    assert report["swap"]["in turn"]["pages"] > 0, "three agents do not fit, so pages come in"
    assert report["swap"]["in turn"]["turns"] == report["swap"]["in line"]["turns"] == 9
    assert min(report["mlx_lm"].values()) > 0
