"""Process groups as they are started: restarts, a launcher that dies, devices that are not there, limits, sockets."""

import json
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

from megatron_lite.config import Config, ConfigError, ParallelConfig
from megatron_lite.distributed import collectives
from megatron_lite.distributed import process_group as distributed
from megatron_lite.distributed.environment import Environment, prepare_libraries
from megatron_lite.distributed.mesh import build_mesh
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


def meet(store, cards, seconds=20):
    """Every rank's (store, hosts, whether there was an attempt before) or error; a rank is a thread of this process."""
    outcomes = [None] * len(cards)

    def one(rank):
        try:
            own, seen, again = distributed.meet(
                store, rank, len(cards), cards[rank], timedelta(seconds=seconds)
            )
            own.set(f"probe/{rank}", "")  # a key that only this attempt's part of the store shows
            outcomes[rank] = own, [card["host"] for card in seen], again
        except dist.DistError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(cards)) if cards[rank]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def card(host, device="cpu", problem=None):
    return {"device": device, "problem": problem, "host": host}


def test_attempts_agree_on_a_part_of_the_store_that_none_before_had():
    store, cards = dist.HashStore(), [card("a"), card("b"), card("c")]
    first = meet(store, cards)
    # An attempt of which only rank 1 came: what it left must not answer for it in the next one.
    store.set("card/1", json.dumps(card("dead") | {"token": "0"}))
    second = meet(store, cards)
    for outcomes, again in ((first, False), (second, True)):
        assert [(hosts, restarted) for _, hosts, restarted in outcomes] == [(["a", "b", "c"], again)] * 3
        for own, *_ in outcomes:  # written by each, seen by all
            assert own.check([f"probe/{rank}" for rank in range(3)])
    second[0][0].set("new", "")
    assert not first[0][0].check(["new"])


def test_a_check_that_refused_an_attempt_is_asked_again_in_the_next(monkeypatch):
    """torchrun starts a refused run again too: only one that passed may find what it saved itself."""
    store, asked = dist.HashStore(), []
    monkeypatch.setattr(distributed, "end_with_launcher", lambda environment: None)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 1)]))
    config = config_on(device="cpu")

    def attempt(restart_count, refused):
        def check():
            asked.append(restart_count)
            if refused:
                raise ConfigError("another run's")

        environment = Environment(launched=True, restart_count=restart_count)
        try:
            with distributed.process_group(config, environment) as (_, once):
                once(check)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    for count in range(2):
        with pytest.raises(ConfigError):
            attempt(count, refused=True)
    attempt(2, refused=False)
    attempt(3, refused=True)
    store = dist.HashStore()  # one that a restart did not keep
    attempt(4, refused=True)
    assert asked == [0, 1, 2]


def test_a_rank_that_does_not_come_is_named():
    outcomes = meet(dist.HashStore(), [card("a"), card("b"), None, None, None], seconds=1)
    assert str(outcomes[0]).startswith("ranks 2-4 of 5 did not start within 0:00:01")
    assert "rank 0" in str(outcomes[1])


@pytest.mark.parametrize(
    "cards, says",
    [
        (
            [card("a", "cuda"), card("a", "cuda"), card("b"), card("a", "cuda")],
            "the ranks compute on different devices (cuda on a: ranks 0-1, 3; cpu on b: ranks 2), wanted one type: "
            "--device sets it",
        ),
        (
            [card("a", "cuda"), card("b", problem="CUDA cannot be used on b")],
            "rank 1: CUDA cannot be used on b",
        ),
    ],
)
def test_ranks_whose_devices_differ_or_fail_are_named_on_all(cards, says):
    with pytest.raises(ConfigError) as error:
        distributed._check_devices(cards)
    assert str(error.value) == says


def config_on(**parallel):
    return replace(Config(), parallel=ParallelConfig(**parallel))


def without_cuda(monkeypatch, files, built_for):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(distributed, "NVIDIA_FILES", files)


@pytest.mark.parametrize("has_driver, built_for", [(True, None), (False, "13.0"), (True, "13.0")])
def test_no_silent_cpu(monkeypatch, tmp_path, has_driver, built_for):
    without_cuda(monkeypatch, (tmp_path,) if has_driver else (tmp_path / "none",), built_for)
    with pytest.raises(ConfigError, match="CUDA cannot be used on .*--device cpu") as error:
        distributed.choose_device(config_on(), Environment(cuda_visible_devices=""))
    assert (f"this machine has {tmp_path}" in str(error.value)) == has_driver
    assert f"is built for {'CUDA 13.0' if built_for else 'the CPU only'}" in str(error.value)
    assert "CUDA_VISIBLE_DEVICES is ''" in str(error.value)
    for parallel in ({"device": "cpu"}, {"cpu": True}):
        assert distributed.choose_device(config_on(**parallel), Environment()).type == "cpu"


def test_without_any_sign_of_cuda_the_cpu_is_meant_unless_cuda_is_asked_for(monkeypatch, tmp_path):
    without_cuda(monkeypatch, (tmp_path / "none",), None)
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
    with distributed.process_group(config, Environment.read()) as (device, _):
        mesh = build_mesh(config, device)
        # What a run does: saves gather over the host group, the hosts take a word from the first rank.
        dist.all_gather_object([None] * dist.get_world_size(), 1, group=mesh.host_group)
        collectives.from_first_rank("word", mesh.host_group)
        mesh.wait_for_all_hosts()
        backends = [group._get_backend(device) for group in dist.distributed_c10d._world.pg_map]
        soft, hard = distributed.resource.getrlimit(distributed.resource.RLIMIT_NOFILE)
        sockets = _sockets()
        dist.barrier()  # a rank that is done closes its ends
        return sockets, {backend.options._timeout.total_seconds() for backend in backends}, soft == hard


def test_sockets_timeouts_and_open_files():
    """A socket a rank for each further rank of the world, at most; one time limit on every group there is."""
    counts = {}
    for size in (4, 8):
        config = make_config(dp=size // 2, pp=2)
        config = replace(config, parallel=replace(config.parallel, device="cpu"))
        ranks = run_ranks(_groups, size, config)
        store_server = [size - 1, *[0] * (size - 1)]  # under torchrun the launcher's
        counts[size] = max(sockets - served for (sockets, *_), served in zip(ranks, store_server))
        assert all(seconds == {120.0} and raised for _, seconds, raised in ranks)
    assert counts[8] - counts[4] <= 4, counts
