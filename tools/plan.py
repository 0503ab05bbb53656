"""Which layout fits so many GPUs and runs fastest: memory, step time and MFU, predicted from the flags alone.

    python tools/plan.py --num-gpus 64 --gpus-per-node 8 --gpu h100 <the model and training flags of pretrain_gpt.py>
    python tools/plan.py --num-gpus 64 --gpu h100 --model DIR --global-batch-size 512 --seq-length 4096

DIR is a Hugging Face model's folder or its config.json; model flags beside it win. Layout flags that are given are
held, the others are chosen. Everything printed is an estimate: docs/planning.md says how it is made and how far it is
from published runs.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.pipeline_schedule import SCHEDULES
from megatron_lite.arithmetic.vocabulary import known_vocabulary, with_vocabulary
from megatron_lite.config import Config, ConfigError
from megatron_lite.config.declare import flag_name
from megatron_lite.distributed.environment import Environment
from megatron_lite.files.command_line import Parser, number, run
from megatron_lite.files.reading import read_object
from megatron_lite.hugging_face.model_config import command_line_of, read_model_config
from megatron_lite.planning.devices import DEVICES, GIB, Cluster, Device, custom_device
from megatron_lite.planning.search import RECOMPUTE, Found, Layout, Plan, nothing_fits, search

CUSTOM = ("gpu_memory_gb", "gpu_tflops", "nvlink_gb_s", "network_gb_s")
TEXTS = {
    "pipeline_schedule": tuple(SCHEDULES),
    "recompute_granularity": RECOMPUTE,
    "reshard_after_forward": ("auto", "always", "never", "keep-last"),
}
# What a run needs and a plan does not: (flags, one of which is needed), a value that the parser takes.
NOT_PLANNED = ((("--train-iters", "--train-samples"), "1"), (("--lr",), "1e-4"))


def build_parser() -> Parser:
    """The planner's own flags, and the layout flags that it holds when they are given."""
    positive = number(1e-6, float)
    epilog = "All other flags are pretrain_gpt.py's: see its --help."
    parser = Parser(__doc__.splitlines()[0], prog="plan.py", epilog=epilog)
    flag = parser.add_argument
    flag("--num-gpus", type=number(1), required=True, help="GPUs to plan for")
    flag("--gpus-per-node", type=number(1), default=8, help="GPUs of one NVLink (default 8)")
    flag("--gpu", choices=(*DEVICES, "custom"), required=True, help="the kind of GPU")
    for name in CUSTOM:
        flag(flag_name(name), type=positive, help="of a --gpu custom")
    flag("--model", type=Path, help="a Hugging Face model's folder, or its config.json")
    share = "share of peak that matrix products reach (default 0.65)"
    flag("--efficiency", type=number(0.01, float, 1.0), help=share)
    flag("--top", type=number(1), default=5, help="layouts to show (default 5)")
    rows = "rows of the fullest expert-parallel rank, as a multiple of the mean (default 1)"
    flag("--imbalance", type=number(1.0, float), default=1.0, help=rows)
    flag("--json", action="store_true", help="print JSON")
    held = parser.add_argument_group("layout flags that are held, not chosen, when given")
    for item in fields(Layout):
        options: dict[str, Any] = {"action": "store_true"} if item.type is bool else {"type": number(1)}
        if item.type is str:
            options = {"choices": TEXTS[item.name]}
        held.add_argument(flag_name(item.name), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
    return parser


def device_of(own: argparse.Namespace) -> Device:
    """The device that the flags name or describe. Raises ConfigError for numbers missing or not wanted."""
    numbers = {flag_name(name): getattr(own, name) for name in CUSTOM}
    missing = [flag for flag, value in numbers.items() if value is None]
    if own.gpu == "custom" and missing:
        raise ConfigError(f"--gpu custom needs {', '.join(missing)}")
    if own.gpu != "custom" and len(missing) < len(numbers):
        given = next(flag for flag in numbers if flag not in missing)
        raise ConfigError(f"{given} describes a --gpu custom, --gpu is {own.gpu}: its data sheet is known")
    device = custom_device(*numbers.values()) if own.gpu == "custom" else DEVICES[own.gpu]
    return replace(device, efficiency=own.efficiency) if own.efficiency else device


def model_flags(path: Path | None) -> list[str]:
    """The flags of a Hugging Face model, if any. Raises ConfigError for one that cannot be trained here."""
    if path is None:
        return []
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"--model {path}: wanted a Hugging Face model's folder, or its config.json")
    return command_line_of(read_model_config(read_object(file), str(file))[0])


def parse_checked(words: Sequence[str]) -> Config:
    """The config that --check accepts (else its ConfigError), with placeholders for what is not planned."""
    placeholders = [f"{flags[0]}={value}" for flags, value in unknown(words)]
    return parse_arguments(["--check", *words, *placeholders], Environment())


def unknown(words: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """Of NOT_PLANNED, what the command line does not give."""
    given = {word.split("=")[0] for word in words}
    return [(flags, value) for flags, value in NOT_PLANNED if not given & set(flags)]


def read_model(flags: Sequence[str]) -> Config:
    """The config of the flags in one process. Raises ConfigError as pretrain_gpt.py, or for an unknown vocabulary."""
    words = ["--world-size", "1", "--micro-batch-size", "1", *flags]
    config = parse_checked(words)
    if config.checkpoint.use_checkpoint_args:
        raise ConfigError("--use-checkpoint-args reads a checkpoint, planning none: give the model's flags")
    if "global_batch_size" not in config.given and config.training.step_batch_size_schedule is None:
        raise ConfigError("--global-batch-size is needed: without it the batch would grow with the GPUs")
    size = known_vocabulary(config)
    if size is None:
        raise ConfigError("the size of the vocabulary is not known from the flags: add --vocab-size N")
    return with_vocabulary(config, size)


def refusal(layout: Layout, flags: Sequence[str], num_gpus: int) -> str | None:
    """What `pretrain_gpt.py --check` would say against a layout; None when it accepts it."""
    try:
        parse_checked(["--world-size", str(num_gpus), *flags, *layout.flags()])
    except ConfigError as error:
        return str(error)
    return None


def describe(found: Found, cluster: Cluster, flags: Sequence[str]) -> str:
    """The table of the best, what became of the others, the assumptions, and the commands."""
    cells = [{"": str(place)} | _cells(plan) for place, plan in enumerate(found.plans, 1)]
    rows = [list(cells[0]), *(list(row.values()) for row in cells)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in rows]
    lines += ["", *_summary(found, cluster), "", _assumptions(cluster)]
    if unknown(flags):
        missing = ", ".join(" or ".join(names) for names, _ in unknown(flags))
        lines += ["", f"the commands still need {missing}; data and tokenizer where they are not given"]
    for place, plan in enumerate(found.plans, 1):
        worst = plan.worst
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in worst.parts.items() if size)
        host = f"; in the node's memory, a GPU: {worst.host / GIB:.2f}" if worst.host else ""
        lines += ["", f"# {place}: memory of pipeline rank {worst.rank}, GiB: {parts}{host}"]
        lines.append(command_of(plan, cluster, flags))
    return "\n".join(lines)


def command_of(plan: Plan, cluster: Cluster, flags: Sequence[str]) -> str:
    """A torchrun command, to be run on each node."""
    nodes = -(-cluster.num_gpus // cluster.gpus_per_node)
    words = ["torchrun", "--nproc-per-node", str(min(cluster.num_gpus, cluster.gpus_per_node))]
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"]
    return shlex.join([*words, "pretrain_gpt.py", *flags, *plan.layout.flags()])


def _cells(plan: Plan) -> dict[str, str]:
    """Column -> cell of a plan's row."""
    layout, time, config = plan.layout, plan.time, plan.config
    tokens = config.training.global_batch_size * config.data.seq_length
    return {
        "pp": str(layout.pipeline_model_parallel_size),
        "chunks": str(layout.num_virtual_stages_per_pipeline_rank),
        "schedule": layout.pipeline_schedule,
        "tp": str(layout.tensor_model_parallel_size),
        "cp": str(layout.context_parallel_size),
        "dp": str(config.parallel.data_parallel_size),
        "copies": str(layout.num_distributed_optimizer_instances),
        "ep": str(layout.expert_model_parallel_size),
        "micro": str(layout.micro_batch_size),
        "recompute": layout.recompute_granularity,
        "reshard": layout.reshard_after_forward,
        "GiB/GPU": f"{plan.worst.total / GIB:.1f}",
        "s/step": f"{time.seconds:.3f}",
        "tokens/s/GPU": f"{tokens / time.seconds / config.parallel.world_size:,.0f}",
        "TFLOP/s": f"{time.tflops:.0f}",
        "MFU": f"{time.mfu:.1%}",
        "idle": f"{time.bubble:.1%}",
        "exposed": f"{time.exposed / time.seconds:.1%}",
    }


def _summary(found: Found, cluster: Cluster) -> list[str]:
    lines = [
        f"{found.tried:,} layouts checked against {cluster.memory_limit / GIB:,.1f} GiB: {found.fitting:,} fit"
    ]
    if found.least_missing is not None:
        size, layout = found.least_missing
        lines[0] += f", {found.too_large:,} do not (the closest needs {size / GIB:,.2f} GiB more:"
        lines[0] += f" {' '.join(layout.flags())})"
    if any(plan.layout.fsdp_cpu_offload for plan in found.plans):
        lines.append("none fits without --fsdp-cpu-offload")
    refused = sorted(found.refused.items(), key=lambda item: -item[1])
    return lines + [f"{count:,} cannot run: {reason}" for reason, count in refused]


def _assumptions(cluster: Cluster) -> str:
    device = cluster.device
    return (
        f"an estimate: matrix products reach {device.efficiency:.0%} of the {device.flops / 1e12:,.0f} TFLOP/s peak, "
        f"links {cluster.link_efficiency:.0%} of {device.nvlink / 1e9:,.0f} (NVLink) and {device.network / 1e9:,.0f} "
        f"GB/s (network) a GPU and direction; {cluster.memory_limit / GIB:,.1f} GiB of {device.memory / GIB:,.1f} a "
        "GPU are planned for; tensor and context communication is not overlapped, FSDP's is; data loading, logging, "
        "checkpoints and kernel launches (small models) are not counted"
    )


def as_json(found: Found, cluster: Cluster, flags: Sequence[str]) -> str:
    """The same as describe, for programs; bytes, seconds, shares."""
    plans = [
        {
            "layout": asdict(plan.layout) | {"data_parallel_size": plan.config.parallel.data_parallel_size},
            "memory_bytes": [
                one.parts | {"rank": one.rank, "total": one.total, "host": one.host} for one in plan.memory
            ],
            "step": asdict(plan.time),
            "flags": [*flags, *plan.layout.flags()],
            "command": command_of(plan, cluster, flags),
        }
        for plan in found.plans
    ]
    size, layout = found.least_missing or (None, None)
    others = {
        "tried": found.tried,
        "fit": found.fitting,
        "too_large": found.too_large,
        "closest_that_is_too_large": {"missing_bytes": size, "flags": layout.flags()} if layout else None,
        "cannot_run": found.refused,
    }
    text = {"plans": plans, "others": others, "assumptions": _assumptions(cluster)}
    return json.dumps(text | {"cluster": asdict(cluster)}, indent=1)


def main(argv: Sequence[str]) -> None:
    """Plan and print."""
    own, flags = build_parser().parse_known_args(argv)
    fixed = {f.name: getattr(own, f.name) for f in fields(Layout) if hasattr(own, f.name)}
    cluster = Cluster(device_of(own), own.num_gpus, min(own.gpus_per_node, own.num_gpus))
    if own.num_gpus % cluster.gpus_per_node:
        raise ConfigError(
            f"--num-gpus {own.num_gpus} is not a multiple of --gpus-per-node {own.gpus_per_node}: plan for whole nodes"
        )
    flags = [*model_flags(own.model), *flags]
    config = read_model(flags)
    config = replace(config, command=replace(config.command, imbalance=own.imbalance))
    found = search(config, cluster, fixed, own.top, lambda layout: refusal(layout, flags, own.num_gpus))
    if not found.plans:
        raise nothing_fits(found)
    print((as_json if own.json else describe)(found, cluster, flags))


if __name__ == "__main__":
    run(main)
