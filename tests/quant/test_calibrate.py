"""Calibration: what it chooses, what it measures, what it stores; and `kvd bench ppl` through real pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvd.bench.ppl import ppl, run_ppl, written_bytes
from kvd.errors import InvalidParams
from kvd.ids import FrameId
from kvd.model.describe import calibration_line, stored_calibration
from kvd.model.loader import LoadedModel, load
from kvd.model.registry import ModelFolder
from kvd.quant import calibrate
from kvd.quant.calibrate import calibrate_model, text_windows
from kvd.quant.calibration import (
    CALIBRATION_FILE,
    CONDITIONING_FILE,
    Calibration,
    layer_operators,
    load_calibration,
    page_formats,
    save_calibration,
)
from kvd.quant.simulate import PlainCache
from kvd.store.frame_pool import FramePool
from tests.support.tiny_model import make_tiny_model

TOKENS = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A tiny model folder of this module's own: calibration writes into it."""
    return ModelFolder("tiny", make_tiny_model(tmp_path_factory.mktemp("calibrate") / "tiny"))


@pytest.fixture(scope="module")
def loaded(folder: ModelFolder) -> LoadedModel:
    """The tiny model in memory."""
    return load(folder)


@pytest.fixture(scope="module")
def calibration(loaded: LoadedModel) -> Calibration:
    """Its calibration with short windows."""
    return calibrate_model(loaded, window_tokens=TOKENS)


@pytest.fixture
def copied(calibration: Calibration, tmp_path: Path) -> Path:
    """A folder with only the files of the calibration, to read and to damage."""
    save_calibration(calibration, tmp_path)
    return tmp_path


class Stages:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def stage(self, title: str, total: int | None = None) -> None:
        """Note the stage."""
        self.titles.append(title)

    def advance(self, units: int) -> None:
        """Ignored."""

    def close(self) -> None:
        """Ignored."""


def test_the_smallest_good_format_is_chosen(calibration: Calibration) -> None:
    """Formats are tried smallest first; all before the chosen one were off by more than 2 %, it is not."""
    tried = [score.format for score in calibration.scores]
    assert tuple(tried) == calibrate.CANDIDATES[: len(tried)]
    assert calibration.chosen == tried[-1]
    assert calibration.scores[-1].ratio <= calibrate.RATIO_LIMIT
    assert all(score.ratio > calibrate.RATIO_LIMIT for score in calibration.scores[:-1])


def test_bytes_per_token_are_measured(loaded: LoadedModel, calibration: Calibration) -> None:
    """P29: bytes counted from what the codec made equal the exact bytes of the format's pages."""
    for score in calibration.scores:
        formats = calibration.page_formats(loaded.spec, score.format)
        layouts = [group.layout(each) for group, each in zip(loaded.spec.groups, formats, strict=True)]
        assert score.bytes_per_token == sum(layout.token_bytes for layout in layouts)


def test_facts_are_plain_data(calibration: Calibration) -> None:
    """`facts` can be printed and sent: the format, its bytes, every score."""
    facts = json.loads(json.dumps(calibration.facts()))
    assert facts["kv_format"] == calibration.chosen
    assert facts["scored_tokens"] == 2 * (TOKENS - 1)
    assert facts["scores"] == {score.format: score.ratio for score in calibration.scores}, "rounded where it is printed"


def test_a_ratio_is_rounded_once(copied: Path, calibration: Calibration) -> None:
    """1.01455 is +1.5 % at install as it is in `kvd model info`: not 1.0145 first, then +1.4 %."""
    scores = (*calibration.scores[:-1], replace(calibration.scores[-1], ratio=1.01455))
    found = replace(calibration, scores=scores)
    save_calibration(found, copied)
    stored = stored_calibration(ModelFolder("m", copied))
    assert stored is not None
    assert "perplexity +1.5 %" in calibration_line(found.facts())
    assert calibration_line(found.facts()) == calibration_line(stored)


def test_results_survive_the_disk(copied: Path, loaded: LoadedModel, calibration: Calibration) -> None:
    """Stored and loaded results are equal, constants bit for bit, and name conditioned formats by their digest."""
    found = load_calibration(copied, loaded.spec.fingerprint)
    assert found is not None
    assert (found.chosen, found.scores, found.ppl_fp) == (calibration.chosen, calibration.scores, calibration.ppl_fp)
    assert [c.digest for c in found.conditioning] == [c.digest for c in calibration.conditioning]
    assert found.page_formats(loaded.spec, "q4c")[0].layers[0].k.conditioning == calibration.conditioning[0].digest
    assert found.page_formats(loaded.spec)[0].name == calibration.chosen
    assert sorted(layer_operators(loaded.spec, found.conditioning)) == [0, 1]


def test_a_stale_calibration_is_not_used(copied: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: another fingerprint or codec version makes it stale."""
    assert load_calibration(copied, loaded.spec.fingerprint) is not None
    assert load_calibration(copied, "f" * 32) is None
    monkeypatch.setattr("kvd.quant.calibration.CODEC_VERSION", 99)
    assert load_calibration(copied, loaded.spec.fingerprint) is None


@pytest.mark.parametrize("name", [CALIBRATION_FILE, CONDITIONING_FILE])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_calibration_is_not_used(copied: Path, loaded: LoadedModel, name: str, damage: str) -> None:
    """P4: missing, cut or flipped files mean "not calibrated", never wrong constants."""
    path = copied / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        # in the JSON a digit of a digest, in the tensors a mantissa
        at = content.index(b'"conditioning"') + 22 if name == CALIBRATION_FILE else len(content) - 2
        content[at] ^= 1
        path.write_bytes(content)
    assert load_calibration(copied, loaded.spec.fingerprint) is None


def test_a_folder_is_loaded_and_progress_reported(folder: ModelFolder) -> None:
    """`kvd model pull` hands over a folder; stages are told in order; the same text gives the same result."""
    stages = Stages()
    result = calibrate_model(folder, stages, candidates=("q8",), window_tokens=TOKENS)
    assert (result.chosen, len(result.scores)) == ("q8", 1)
    stored = load_calibration(folder.path, result.fingerprint)
    assert stored is not None
    assert stored.facts() == result.facts()
    assert [title.split()[-1] for title in stages.titles] == ["tiny", "channels", "precision", "q8"]


def test_when_nothing_is_good_the_best_is_taken(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an impossible limit every candidate is scored and the least ratio wins."""
    monkeypatch.setattr(calibrate, "RATIO_LIMIT", 0.5)
    result = calibrate_model(loaded, candidates=("q2", "q8", "q4"), window_tokens=TOKENS)
    assert len(result.scores) == 3
    assert result.chosen == min(result.scores, key=lambda score: score.ratio).format


def test_windows_do_not_overlap_and_are_held_out(loaded: LoadedModel) -> None:
    """Windows are different stretches of the text, of exactly the length asked for; too many are refused."""
    windows = text_windows(loaded, 4, TOKENS)
    assert [len(ids) for ids in windows] == [TOKENS] * 4
    assert len({tuple(ids) for ids in windows}) == 4
    with pytest.raises(InvalidParams):
        text_windows(loaded, 4, 10**7)


def test_q4c_needs_constants(loaded: LoadedModel) -> None:
    """Without a calibration the conditioned format cannot be named; the error says what to run."""
    with pytest.raises(InvalidParams, match="calibrate"):
        page_formats(loaded.spec, "q4c")


def test_the_plain_cache_has_mlx_lms_masks() -> None:
    """The baseline's masks are causal, with the window where it matters."""
    cache = PlainCache()
    assert cache.make_mask(1) is None
    assert cache.make_mask(5) == "causal"
    ages = np.arange(6)[:, None] - np.arange(6)[None]
    np.testing.assert_array_equal(np.array(cache.make_mask(6, window_size=3)), (ages >= 0) & (ages < 3))
    np.testing.assert_array_equal(np.array(cache.make_mask(6, return_array=True)), ages >= 0)


# ---- kvd bench ppl --------------------------------------------------------------------------------------------------


def test_rows_come_from_real_pages(loaded: LoadedModel, calibration: Calibration) -> None:
    """P29: bytes per token are counted in frames; q4 and q4c take 0.28125 of FP16, k8v4 0.40625; ratios are sane."""
    rows = run_ppl(
        loaded, ["q8", "k8v4", "q4", "q4c"], windows=2, window_tokens=270, conditioning=calibration.conditioning
    )
    assert [row.format for row in rows] == ["q8", "k8v4", "q4", "q4c"]
    assert [row.ratio_to_fp16 for row in rows] == [0.53125, 0.40625, 0.28125, 0.28125]
    assert rows[2].bytes_per_token == loaded.spec.groups[0].fp16_token_bytes * 0.28125
    assert abs(rows[0].ratio - 1) < 0.02
    for row in rows:
        assert row.ratio == pytest.approx(row.ppl / row.ppl_fp)
        assert row.ratio_low is not None
        assert row.ratio_high is not None
        assert row.ratio_low <= row.ratio <= row.ratio_high
        assert (row.windows, row.tokens) == (2, 2 * 269)


def test_bytes_are_counted_in_the_frames(loaded: LoadedModel) -> None:
    """P29: a pool whose frames hold another format reports that format's bytes, whatever the name says."""
    group = loaded.spec.groups[0]
    pool = FramePool(1 << 28)
    q4, q8 = group.layout(group.format("q4")), group.layout(group.format("q8"))
    for number, layout in enumerate((q4, q8)):
        pool.create(FrameId(number), layout)
    assert written_bytes(pool, [FrameId(0)], 10) == 10 * q4.token_bytes
    assert written_bytes(pool, [FrameId(0), FrameId(1)], 300) == 256 * q4.token_bytes + 44 * q8.token_bytes


def test_pages_and_simulation_agree(loaded: LoadedModel, calibration: Calibration) -> None:
    """What calibration simulates is what serving does: the same perplexity through real pages, to 0.1 %."""
    scored = run_ppl(loaded, ["q4"], windows=2, window_tokens=TOKENS)
    simulated = next(score for score in calibration.scores if score.format == "q4")
    assert scored[0].ppl == pytest.approx(simulated.ppl, rel=1e-3)


def test_one_window_has_no_interval(loaded: LoadedModel) -> None:
    """An interval needs two windows; unknown formats are refused before anything runs."""
    row = run_ppl(loaded, ["q4"], windows=1, window_tokens=TOKENS)[0]
    assert (row.ratio_low, row.ratio_high) == (None, None)
    with pytest.raises(InvalidParams, match="q9"):
        run_ppl(loaded, ["q9"])


def test_the_command_prints_a_table_and_json(folder: ModelFolder, calibration: Calibration) -> None:
    """`kvd bench ppl`: one JSON object with `--json`, a table without; errors name what is allowed."""
    model = ["--model", str(folder.path), "--windows", "1", "--window-tokens", str(TOKENS)]
    done = CliRunner().invoke(ppl, [*model, "--formats", "q4", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["model"] == "tiny"
    assert facts["rows"][0]["ratio_to_fp16"] == 0.28125
    table = CliRunner().invoke(ppl, [*model, "--formats", "q8"])
    assert table.exit_code == 0, table.output
    assert "q8" in table.stdout
    assert "0.53125" in table.stdout
    wrong = CliRunner().invoke(ppl, [*model, "--formats", "q9"])
    assert wrong.exit_code == 2
    assert "k8v4" in wrong.output
