"""An exception on one rank: every rank ends soon, the run reports failure, and that rank's error is what is seen."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
FLAGS = """
    --cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 8 --train-iters 5 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 61 --mock-data
    --pipeline-model-parallel-size 2
"""


def test_one_rank_s_error_ends_all_and_is_shown():
    """tests/parallel/failing_run.py is verify_parity with a stage that raises on rank 2 in its second step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--master-port", str(free_port()), "-m", "tests.parallel.failing_run", *FLAGS.split()]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        _, told = run.communicate(timeout=120)
        ended = time.time()
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 1
    failed_at = float(told.split("failing at ")[1].split()[0])
    assert ended - failed_at < 30
    assert "ValueError: planted on rank 2" in told
    errors = [line for line in told.splitlines() if line.startswith("[rank ")]
    assert len(errors) == 1 and errors[0].startswith("[rank 2]"), errors
