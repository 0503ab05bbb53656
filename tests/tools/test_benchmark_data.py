"""The suites of data and checkpoints: they run, give figures, and refuse work that is not the same."""

import math

import pytest

from megatron_lite.files.command_line import RunError
from tools.benchmarks import checkpoint, preprocess, samples
from tools.benchmarks.comparison import Options
from tools.benchmarks.ranks import run_ranks

OPTIONS = Options(repeats=1, quick=True)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "suite",
    [samples.run_index, samples.run_samples, checkpoint.run, preprocess.run],
    ids=lambda suite: suite.__module__,
)
def test_a_suite_gives_figures_and_leaves_nothing(suite, tmp_path):
    tables = suite(OPTIONS)
    rows = [row for table in tables for row in table.rows]
    assert rows and all(math.isfinite(row.value) and row.value > 0 for row in rows)
    assert any(row.verdict for row in rows)
    assert not list(tmp_path.iterdir())


def test_an_index_in_another_order_is_refused(monkeypatch):
    build = samples.build_entry
    monkeypatch.setattr(
        samples, "build_entry", lambda s, p, o, seed, *more, **known: build(s, p, o, seed + 1, *more, **known)
    )
    with pytest.raises(RunError, match="not the same work: the order of documents and of samples"):
        samples.run_index(OPTIONS)


def test_samples_of_other_tokens_are_refused(monkeypatch):
    monkeypatch.setattr(samples, "piece_bounds", lambda dataset, index: [(0, 257)])
    with pytest.raises(RunError, match="not the same work: the tokens read"):
        samples.run_samples(OPTIONS)


def test_other_tokens_from_a_text_are_refused(monkeypatch):
    def turn(name, digest):
        def make(*arguments):
            arguments[-1][name] = digest
            return lambda: 1.0

        return make

    monkeypatch.setattr(preprocess, "our_turn", turn("ours", "1234"))
    monkeypatch.setattr(preprocess, "encode_batch_turn", turn("encode_batch", "1234"))
    monkeypatch.setattr(preprocess, "megatron_turn", turn("Megatron's way", "5678"))
    with pytest.raises(RunError, match="not the same work: the sha256 of .bin of Megatron's way is 5678"):
        preprocess.run(OPTIONS)


def test_a_program_that_fails_says_so_itself(tmp_path):
    command = preprocess.our_command(tmp_path, tmp_path / "absent.jsonl", 1)
    for start in (preprocess.finish, preprocess.peak_memory):
        with pytest.raises(RunError, match="preprocess_data.py failed: error: .* has no tokenizer.json"):
            start([*command, "--workers", "1"])


def _read_half(folder):
    def half(state):
        for name, target in state.targets.items():
            target[: len(target) // 2] = state.tensors[name][: len(target) // 2]

    checkpoint.State.read_plain = half
    return checkpoint.contests(folder, 1 << 20, 1)


def test_a_baseline_that_reads_less_is_refused(tmp_path):
    with pytest.raises(RunError, match="not the same work: what was read"):
        run_ranks(_read_half, 1, str(tmp_path))
