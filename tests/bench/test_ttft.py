"""`kvd bench ttft`: prompts of an exact length, figures from real runs, refusals of bad lengths."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvd.bench.cli import bench, parse_lengths
from kvd.bench.ttft import NEW_TOKENS, make_prompt
from kvd.errors import InvalidParams
from kvd.model.tokenizer import TextCodec


def test_lengths_are_positive_integers() -> None:
    """Anything else is refused with an example."""
    assert parse_lengths("1024,4096") == (1024, 4096)
    for bad in ("", "abc", "0", "12,-3"):
        with pytest.raises(InvalidParams, match="1024,4096"):
            parse_lengths(bad)


@pytest.mark.parametrize("tokens", [16, 255, 600])
def test_a_prompt_has_the_asked_length_and_continues(tiny_model_dir: Path, tokens: int) -> None:
    """The context has that many tokens, the suffix adds text, and both together start the whole text."""
    codec = TextCodec.from_folder(tiny_model_dir)
    prompt = make_prompt(codec, tokens)
    assert abs(prompt.tokens - tokens) <= 1, "cutting text can merge the last token otherwise"
    assert prompt.suffix
    assert len(prompt.ids) == tokens + NEW_TOKENS
    assert codec.encode_content(prompt.context + prompt.suffix)[: tokens - 1] == list(prompt.ids)[: tokens - 1]


@pytest.mark.daemon
def test_the_command_reports_every_state(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One JSON object: cold, hot and warm with their reuse, mlx-lm's figure, and how the page cache was dropped."""
    monkeypatch.setenv("KVD_THREADS", "1")
    arguments = ["ttft", "--tokens", "300", "--repeats", "1", "--model", str(tiny_model_dir), "--json"]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    (row,) = report["rows"]
    assert row["hot_cached_tokens"] == row["warm_cached_tokens"] == row["tokens"]
    assert min(row["cold_s"], row["hot_s"], row["warm_s"], row["mlx_lm_cold_s"]) > 0
    assert row["mlx_lm_step"] in (512, 2048)
    assert report["page_cache"]


@pytest.mark.parametrize(
    "arguments", [["ttft", "--tokens", "abc"], ["ppl", "--formats", "zz"], ["ppl", "--formats", ","]], ids=str
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    """As for every other command; and before a model is looked for."""
    result = CliRunner().invoke(bench, [*arguments, "--model-dir", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert CliRunner().invoke(bench, ["ppl", "--model", "none", "--model-dir", str(tmp_path)]).exit_code == 1
