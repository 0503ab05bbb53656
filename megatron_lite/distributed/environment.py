"""What torchrun and the shell tell a process; the only reader of os.environ.

Pure: the arguments need the rank and the world size before torch is imported.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.config.declare import ConfigError


@dataclass(frozen=True)
class Environment:
    """One process of the run, as its launcher describes it. Without a launcher: one process, rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    restart_count: int = 0
    run_id: str | None = None
    launched: bool = False
    launcher_pid: int | None = None  # torchrun's: read before torch is imported, or it may be gone by then
    cuda_visible_devices: str | None = None
    wandb_run_id: str | None = None
    slurm_job_id: str | None = None

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> "Environment":
        """Read the process's variables (or the given ones). Raises ConfigError for a value that is no number."""
        variables = os.environ if variables is None else variables
        return cls(
            rank=_number(variables, "RANK", 0),
            world_size=_number(variables, "WORLD_SIZE", 1),
            local_rank=_number(variables, "LOCAL_RANK", 0),
            local_world_size=_number(variables, "LOCAL_WORLD_SIZE", 1),
            master_addr=variables.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(variables, "MASTER_PORT", None),
            restart_count=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
            run_id=variables.get("TORCHELASTIC_RUN_ID"),
            launched="WORLD_SIZE" in variables,
            launcher_pid=os.getppid() if "TORCHELASTIC_RUN_ID" in variables else None,
            cuda_visible_devices=variables.get("CUDA_VISIBLE_DEVICES"),
            wandb_run_id=variables.get("WANDB_RUN_ID"),
            slurm_job_id=variables.get("SLURM_JOB_ID"),
        )


def set_default(name: str, value: str) -> str:
    """Set a variable that a library reads later unless the user has set it; returns the value in force."""
    return os.environ.setdefault(name, value)


def prepare_libraries(deterministic: bool) -> list[str]:
    """Set what CUDA, NCCL and gloo read when they start, so call it before; lines about what a user may not expect.

    Sources: torch's notes on CUDA (allocator) and on reproducibility (cuBLAS), Megatron-LM's arguments.py, which asks
    for the opposite of CUDA_DEVICE_MAX_CONNECTIONS=1 together with FSDP2, and for a fixed NCCL_ALGO when deterministic.
    """
    notes = []
    # A socket for each pair that talks, not for each pair of each group.
    set_default("TORCH_GLOO_LAZY_INIT", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        set_default("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        notes.append(
            "warning: CUDA_DEVICE_MAX_CONNECTIONS=1 is taken out of the environment: with FSDP it would make "
            "communication and computation wait for each other"
        )
    if deterministic:
        set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        notes.append(f"--deterministic-mode: NCCL_ALGO={set_default('NCCL_ALGO', 'Ring')}")
    return notes


def _number(variables: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = variables.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise ConfigError(f"the environment variable {name} is '{text}', wanted a whole number")
    return int(text)
