"""N steps straight = stop and resume three times, in the same layout to the last digit, in others to 1e-5."""

import pytest

from tests.runs import flags, metrics, run_alone, train, training_steps, write_data

LAYOUTS = {
    "one": (1, ""),
    "pp2 chunks2 dp2": (4, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "dp2": (2, ""),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def straight(prefix, tmp_path_factory):
    """Steps of an uninterrupted run in the interleaved layout."""
    folder = tmp_path_factory.mktemp("straight")
    world, layout = LAYOUTS["pp2 chunks2 dp2"]
    train(world, flags(prefix, layout, f"--metrics-file {folder}/m.jsonl"))
    steps = training_steps(folder / "m.jsonl")
    assert sorted(steps) == list(range(1, 13))
    losses = [steps[i][0] for i in range(1, 13)]
    assert losses[-1] < losses[0] - 0.5, "the run must learn, or equal losses say nothing"
    return steps


def run_in_parts(prefix, folder, layouts, *more):
    """Run 12 steps in four parts of three, each from the checkpoint of the one before."""
    for part, (world, layout) in enumerate(layouts, 1):
        stop = "--exit-interval 3" if part < len(layouts) else ""
        common = f"--save {folder}/ckpt --load {folder}/ckpt --metrics-file {folder}/m.jsonl"
        assert train(world, flags(prefix, layout, common, stop, *more)) == [0] * world
    return training_steps(folder / "m.jsonl")


def test_three_resumes_in_the_same_layout_are_exact(prefix, straight, tmp_path):
    assert run_in_parts(prefix, tmp_path, [LAYOUTS["pp2 chunks2 dp2"]] * 4) == straight


def test_three_resumes_each_in_another_layout(prefix, straight, tmp_path):
    order = ["pp2 chunks2 dp2", "one", "pp2", "dp2"]
    steps = run_in_parts(prefix, tmp_path, [LAYOUTS[name] for name in order])
    assert sorted(steps) == sorted(straight)
    for iteration, (loss, norm, rate, consumed) in straight.items():
        assert steps[iteration][2:] == (rate, consumed)
        assert steps[iteration][0] == pytest.approx(loss, rel=1e-5)
        assert steps[iteration][1] == pytest.approx(norm, rel=1e-4)


def test_dropout_goes_on_exactly_too(prefix, tmp_path):
    world, layout = LAYOUTS["dp2"]
    dropout = "--hidden-dropout 0.2 --attention-dropout 0.2"
    train(world, flags(prefix, layout, dropout, f"--metrics-file {tmp_path}/straight.jsonl"))
    steps = run_in_parts(prefix, tmp_path, [LAYOUTS["dp2"]] * 4, dropout, "--async-save")
    assert steps == training_steps(tmp_path / "straight.jsonl")


def test_tokens_of_each_source_are_counted_over_ranks_and_resumes(tmp_path):
    first, second = (write_data(tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b")))
    data = ["--data-path", "1", first, "3", second]
    common = (
        f"--save {tmp_path}/ckpt --load {tmp_path}/ckpt --metrics-file {tmp_path}/m.jsonl --log-interval 5"
    )
    train(2, [*flags(first, common, "--exit-interval 6"), *data])
    train(1, [*flags(first, common), *data])
    counted = [r for r in metrics(tmp_path / "m.jsonl") if f"consumed-tokens/{first}" in r]
    # Greedy filling keeps every whole turn of four samples at 1 to 3.
    assert [
        (r["iteration"], r[f"consumed-tokens/{first}"], r[f"consumed-tokens/{second}"]) for r in counted
    ] == [(iteration, iteration * 2 * 16, iteration * 6 * 16) for iteration in (5, 6, 10, 12)]


def test_a_finished_run_has_nothing_to_do(prefix, tmp_path):
    common = f"--save {tmp_path}/ckpt --load {tmp_path}/ckpt"
    short = flags(prefix, common, "--train-iters 2 --lr-warmup-iters 1")
    assert train(1, short) == [0]
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "ckpt").rglob("*") if p.name != "metrics.jsonl"}
    again = run_alone(short)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    assert {
        p: p.stat().st_mtime_ns for p in (tmp_path / "ckpt").rglob("*") if p.name != "metrics.jsonl"
    } == before
