"""Early stops: every rank leaves after the same step, saved and with its last losses printed."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch.distributed as dist

from megatron_lite.training.loop import NonFiniteError
from megatron_lite.training.run import Run
from tests.checkpoint.folders import is_intact
from tests.ranks import free_port, run_ranks
from tests.runs import ROOT, flags, metrics, pretrain_here, write_data


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def _signalled_in_a_step(argv, victim, signalled_step):
    """(steps done, all-reduces over the world) of a run whose victim gets SIGTERM after it has sent a step's loss."""
    iterations, calls = [], Counter()
    update, step, all_reduce = Run._update_weights, Run.step, dist.all_reduce

    def signalled_update(self, norm):
        if dist.get_rank() == victim and self.state.iteration + 1 == signalled_step:
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, norm)

    def counted_step(self, loader):
        result = step(self, loader)
        iterations.append(self.state.iteration)
        return result

    def counted(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        calls["world"] += group in (None, dist.group.WORLD)
        return all_reduce(tensor, op, group, async_op)

    Run._update_weights, Run.step, dist.all_reduce = signalled_update, counted_step, counted
    assert pretrain_here(argv) == 0
    return iterations, calls["world"]


def test_all_ranks_stop_one_step_after_a_signal_that_missed_a_step(prefix, tmp_path):
    """The last rank alone is signalled: what it has seen has to cross the pipeline and the tensor ranks."""
    layout = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --log-interval 100"
    argv = flags(prefix, layout, f"--exit-signal-handler --exit-duration-in-mins 600 --save {tmp_path}")
    outcomes = run_ranks(_signalled_in_a_step, 4, argv, 3, 3)
    assert {tuple(steps) for steps, _ in outcomes} == {(1, 2, 3, 4)}
    # The largest memory of the ranks, for the line of the last interval: no step asks the world for anything.
    assert [calls for _, calls in outcomes] == [1] * 4
    assert is_intact(tmp_path / "iter_0000004")


def _printed(argv):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(NonFiniteError):
        pretrain_here(argv)
    return out.getvalue()


@pytest.mark.parametrize(
    "stop, last",
    [
        ("--exit-duration-in-mins 0", 1),
        ("--exit-interval 3", 3),
        ("--max-consecutive-nonfinite 3 --init-method-std 1e30", 3),
    ],
)
def test_an_early_stop_prints_and_tracks_its_last_interval(prefix, tmp_path, stop, last):
    path = tmp_path / "m.jsonl"
    argv = flags(prefix, f"--log-interval 2 --tensorboard-log-interval 2 --metrics-file {path}", stop)
    (out,) = run_ranks(_printed, 1, argv)
    lines = re.findall(r"iteration +(\d+)/ .* lm loss: (\S+) \|", out)
    assert [int(iteration) for iteration, _ in lines] == [n for n in (2, last) if n <= last]
    record = [r for r in metrics(path) if "lm loss" in r][-1]
    assert record["iteration"] == last
    if "1e30" not in stop:
        assert record["lm loss"] == pytest.approx(float(lines[-1][1]), rel=1e-6)
        assert record["memory-bytes"] > 1 << 20


def torchrun_node(endpoint, argv, slow_s):
    """One of two nodes of two ranks each, on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--nnodes", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    variables = {"OMP_NUM_THREADS": "1", "SLOW_SAVE_S": slow_s, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100"}
    return subprocess.Popen(
        [*command, "-m", "tests.training.slow_save", *argv],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("slow_s", ["3", pytest.param("40", marks=pytest.mark.slow)])
def test_sigterm_to_two_nodes_lets_a_save_end_however_long_it_takes(prefix, tmp_path, slow_s):
    place = f"--save {tmp_path} --metrics-file {tmp_path}/m.jsonl --train-iters 100000 --log-interval 5"
    argv = flags(prefix, place, "--pipeline-model-parallel-size 2 --exit-signal-handler")
    endpoint = f"127.0.0.1:{free_port()}"
    nodes = [torchrun_node(endpoint, argv, slow_s) for _ in range(2)]
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "m.jsonl").exists() or len(metrics(tmp_path / "m.jsonl")) < 6:
            assert time.monotonic() < deadline and all(node.poll() is None for node in nodes)
            time.sleep(0.2)
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        outputs = [node.communicate(timeout=100)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    out = "".join(outputs)
    stopped = int(re.search(r"stopped after iteration (\d+): received SIGTERM", out)[1])
    assert is_intact(tmp_path / f"iter_{stopped:07d}")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().split() == [str(stopped)]
    assert int(re.findall(r"iteration +(\d+)/", out)[-1]) == stopped, "the line of the last interval"
    assert metrics(tmp_path / "m.jsonl")[-1]["iteration"] == stopped
    # torchrun ends with 1 after a signal, whatever its ranks did.
    assert [node.returncode for node in nodes] == [1, 1], out[-3000:]
