"""Process groups as they are started: restarts, a launcher that dies, devices that are not there, limits, sockets."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_lite import distributed
from megatron_lite.config import CheckpointConfig, Config, ConfigError, ParallelConfig
from megatron_lite.environment import Environment, prepare_libraries
from megatron_lite.mesh import build_mesh
from tests.parity import make_config
from tests.ranks import free_port, run_ranks
from tests.runs import ROOT, flags, training_steps, write_data

LAYOUT = "--pipeline-model-parallel-size 2"


def torchrun(argv, *options):
    """The real launcher on a port of its own, two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    command += ["--master-port", str(free_port()), "pretrain_gpt.py", *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks_of(launcher):
    """Process ids of the launcher's workers."""
    listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in listed if b"pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for(condition, what, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited too long for {what}"
        time.sleep(0.1)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_torchrun_restarts_a_run_whose_ranks_are_killed_twice(tmp_path, backend):
    prefix, metrics = write_data(tmp_path / "data"), tmp_path / "m.jsonl"
    place = f"--save {tmp_path}/ckpt --load {tmp_path}/ckpt --save-interval 2 --metrics-file {metrics}"
    argv = flags(prefix, LAYOUT, place, "--train-iters 12")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    launcher = torchrun(argv, "--max-restarts", "3", *(rendezvous if backend == "c10d" else ()))
    try:
        for iteration in (3, 7):
            wait_for(
                lambda i=iteration: metrics.exists() and i in training_steps(metrics), f"step {iteration}"
            )
            os.kill(ranks_of(launcher)[1], signal.SIGKILL)
        out, _ = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, out[-3000:]
    assert sorted(training_steps(metrics)) == list(range(1, 13))
    assert out.count("resumed from") == 2


def test_ranks_end_with_their_launcher(tmp_path):
    metrics = tmp_path / "m.jsonl"
    argv = flags(write_data(tmp_path / "data"), LAYOUT, f"--train-iters 100000 --metrics-file {metrics}")
    argv += ["--save", str(tmp_path / "ckpt"), "--exit-signal-handler"]
    launcher = torchrun(argv)
    wait_for(lambda: metrics.exists() and training_steps(metrics), "the first step")
    ranks = ranks_of(launcher)
    launcher.kill()
    try:
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), "the ranks to end", 20)
    finally:
        for pid in ranks:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
    assert "torchrun is gone: this rank ends without saving" in launcher.communicate()[0]
    assert not list((tmp_path / "ckpt").glob("iter_*"))


def join(store, world_size, kinds, seconds=20):
    """Every rank's prefix or error, each rank a thread of this process."""
    outcomes = [None] * world_size

    def one(rank):
        try:
            outcomes[rank] = distributed.join_attempt(
                store, rank, world_size, f"{kinds[rank]} host{rank}", timedelta(seconds=seconds)
            )
        except (ConfigError, dist.DistError) as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_attempts_agree_on_a_prefix_that_none_before_had():
    store = dist.HashStore()
    first = join(store, 3, ["cpu"] * 3)
    # An attempt of which only some ranks came so far: what they left must not answer for the next one.
    store.set("greeting/1", "0123456789abcdef cpu dead")
    store.set("answer/1", "")
    second, third = join(store, 3, ["cpu"] * 3), join(store, 3, ["cpu"] * 3)
    prefixes = [*first, *second, *third]
    assert all(isinstance(prefix, str) for prefix in prefixes)
    assert [len(set(attempt)) for attempt in (first, second, third)] == [1, 1, 1]
    assert len(set(prefixes)) == 3


def test_a_rank_on_another_device_is_named_on_all():
    errors = join(dist.HashStore(), 3, ["cuda", "cuda", "cpu"])
    says = (
        "1 of 3 ranks compute on another device than rank 0's cuda (rank 2 on host2: cpu), wanted one type: "
        "mend these hosts or leave them out"
    )
    assert [str(error) for error in errors] == [says] * 3


def config_on(**parallel):
    return replace(Config(), parallel=ParallelConfig(**parallel))


@pytest.mark.parametrize(
    "devices, built_for", [(["nvidia0", "nvidia1"], None), ([], "13.0"), (["nvidia0"], "13.0")]
)
def test_no_silent_cpu(monkeypatch, devices, built_for):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / name for name in devices])
    with pytest.raises(
        ConfigError, match=rf"CUDA cannot be used on .*\({len(devices)} NVIDIA devices, .*--device cpu"
    ):
        distributed.choose_device(config_on(), Environment())
    for parallel in ({"device": "cpu"}, {"cpu": True}):
        assert distributed.choose_device(config_on(**parallel), Environment()).type == "cpu"


def test_without_any_sign_of_cuda_the_cpu_is_meant_unless_cuda_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [])
    assert distributed.choose_device(config_on(), Environment()).type == "cpu"
    with pytest.raises(ConfigError, match="CUDA cannot be used"):
        distributed.choose_device(config_on(device="cuda"), Environment())


def test_a_local_rank_without_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.choose_device(config_on(), Environment(local_rank=1)) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="local rank 2 has no GPU of its own, this machine has 2"):
        distributed.choose_device(config_on(), Environment(local_rank=2))


def test_what_libraries_read_at_their_start(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    (warning,) = prepare_libraries(deterministic=False)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 is taken out" in warning
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "mine")
    assert prepare_libraries(deterministic=True) == ["--deterministic-mode: NCCL_ALGO=Ring"]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and os.environ["PYTORCH_ALLOC_CONF"] == "mine"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def _sockets():
    return sum(
        "socket:" in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
    )


def _groups(config):
    """(sockets after all groups are made and used, seconds that each axis waits, the limit of open files)."""
    with distributed.process_group(config, Environment.read()) as device:
        mesh = build_mesh(config, device)
        # What a run does: saves gather over the host group, the world takes a word from the first rank.
        dist.all_gather_object([None] * dist.get_world_size(), 1, group=mesh.host_group)
        distributed.from_first_rank("word")
        groups = [*mesh.groups.values(), mesh.token_group, mesh.host_group, dist.group.WORLD]
        backends = [group._get_backend(device) for group in groups]
        soft, hard = distributed.resource.getrlimit(distributed.resource.RLIMIT_NOFILE)
        dist.barrier()
        return _sockets(), {backend.options._timeout.total_seconds() for backend in backends}, soft == hard


def test_sockets_timeouts_and_open_files():
    """A socket a rank for each further rank of the world, at most; one time limit on every axis."""
    counts = {}
    for size in (4, 8):
        config = replace(make_config(dp=size // 4, pp=2, tp=2), checkpoint=CheckpointConfig(load="x"))
        ranks = run_ranks(_groups, size, config)
        counts[size] = max(sockets for sockets, *_ in ranks)
        assert all(seconds == {120.0} and raised for _, seconds, raised in ranks)
    assert counts[8] - counts[4] <= 4, counts
