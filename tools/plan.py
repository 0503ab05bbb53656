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
from megatron_lite.hugging_face.fields import read_json
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
ASSUMED = (
    "an estimate: matrix products reach {efficiency:.0%} of the {peak:,.0f} TFLOP/s peak, links {link:.0%} of "
    "{nvlink:,.0f} (NVLink) and {network:,.0f} GB/s (network) a GPU and direction; {limit:,.1f} GiB of {memory:,.1f} "
    "a GPU are planned for; tensor and context communication is not overlapped, FSDP's is; data loading, logging, "
    "checkpoints and kernel launches (small models) are not counted"
)


def build_parser() -> Parser:
    """The planner's own flags, and the layout flags that it holds when they are given."""
    positive = number(1e-6, float)
    parser = Parser(
        __doc__.splitlines()[0],
        prog="plan.py",
        epilog="All other flags are pretrain_gpt.py's: see its --help.",
    )
    parser.add_argument("--num-gpus", type=number(1), required=True, help="GPUs to plan for")
    parser.add_argument(
        "--gpus-per-node", type=number(1), default=8, help="GPUs behind one NVLink (default 8)"
    )
    parser.add_argument("--gpu", choices=(*DEVICES, "custom"), required=True, help="the kind of GPU")
    for name in CUSTOM:
        parser.add_argument(flag_name(name), type=positive, help="of a --gpu custom")
    parser.add_argument("--model", type=Path, help="a Hugging Face model's folder, or its config.json")
    parser.add_argument(
        "--efficiency",
        type=number(0.01, float, 1.0),
        help="share of peak that matrix products reach (default 0.65)",
    )
    parser.add_argument("--top", type=number(1), default=5, help="layouts to show (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    held = parser.add_argument_group("layout flags that are held, not chosen, when given")
    for item in fields(Layout):
        options: dict[str, Any] = {"action": "store_true"} if item.type is bool else {"type": number(1)}
        if item.type is str:
            options = {"choices": TEXTS[item.name]}
        held.add_argument(flag_name(item.name), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
    return parser


def device_of(own: argparse.Namespace) -> Device:
    """The device that the flags name or describe.

    Raises:
        ConfigError: a custom one without all its numbers, or numbers for a known one.
    """
    given = {name: getattr(own, name) for name in CUSTOM if getattr(own, name) is not None}
    flags = [flag_name(name) for name in CUSTOM]
    if own.gpu == "custom":
        missing = [flag for flag, name in zip(flags, CUSTOM) if name not in given]
        if missing:
            raise ConfigError(f"--gpu custom needs {', '.join(missing)}")
        device = custom_device(*(given[name] for name in CUSTOM))
    elif given:
        first = flag_name(next(iter(given)))
        raise ConfigError(f"{first} describes a --gpu custom, --gpu is {own.gpu}: its data sheet is known")
    else:
        device = DEVICES[own.gpu]
    return replace(device, efficiency=own.efficiency) if own.efficiency else device


def model_flags(path: Path | None) -> list[str]:
    """The model flags of a Hugging Face model; none without one.

    Raises:
        ConfigError: there is no config.json, or it is of a model that cannot be trained here.
    """
    if path is None:
        return []
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"--model {path}: wanted a Hugging Face model's folder, or its config.json")
    return command_line_of(read_model_config(read_json(file), str(file))[0])


def parse_checked(words: Sequence[str]) -> Config:
    """The config that `pretrain_gpt.py --check` accepts, by a placeholder for what planning need not know.

    Raises:
        ConfigError: what it would say.
    """
    placeholders = [f"{flags[0]}={value}" for flags, value in unknown(words)]
    return parse_arguments(["--check", *words, *placeholders], Environment())


def unknown(words: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """Of NOT_PLANNED, what the command line does not give."""
    given = {word.split("=")[0] for word in words}
    return [(flags, value) for flags, value in NOT_PLANNED if not given & set(flags)]


def read_model(flags: Sequence[str]) -> Config:
    """The complete config of the flags in one process, with its vocabulary.

    Raises:
        ConfigError: what pretrain_gpt.py would say, or an unknown vocabulary.
    """
    words = ["--world-size", "1", "--micro-batch-size", "1", *flags]
    config = parse_checked(words)
    if config.checkpoint.use_checkpoint_args:
        raise ConfigError(
            "--use-checkpoint-args reads a checkpoint, which planning does not: give the model's flags"
        )
    if "global_batch_size" not in config.given and config.training.step_batch_size_schedule is None:
        raise ConfigError("--global-batch-size is needed: without it the batch would grow with the GPUs")
    size = known_vocabulary(config)
    if size is None:
        raise ConfigError("the size of the vocabulary is not known from the flags: add --vocab-size N")
    return with_vocabulary(config, size)


def flags_of(plan: Plan, flags: Sequence[str]) -> list[str]:
    """The command line of pretrain_gpt.py for a plan."""
    return [*flags, *plan.layout.flags()]


def refusal(layout: Layout, flags: Sequence[str], num_gpus: int) -> str | None:
    """What `pretrain_gpt.py --check` would say against a layout; None when it accepts it."""
    try:
        words = ["--world-size", str(num_gpus), *flags, *layout.flags()]
        parse_checked(words)
    except ConfigError as error:
        return str(error)
    return None


def describe(found: Found, cluster: Cluster, flags: Sequence[str]) -> str:
    """The table of the best, what became of the others, the assumptions, and the commands."""
    rows = [
        ("", "pp", "chunks", "schedule", "tp", "cp", "dp", "copies", "micro", "recompute", "reshard")
        + ("GiB/GPU", "s/step", "tokens/s/GPU", "TFLOP/s", "MFU", "idle", "exposed")
    ]
    rows += [_row(place, plan) for place, plan in enumerate(found.plans, 1)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in rows]
    lines += ["", *_summary(found, cluster), "", _assumptions(cluster)]
    if unknown(flags):
        missing = ", ".join(" or ".join(names) for names, _ in unknown(flags))
        lines += [
            "",
            f"the commands still need {missing}; the data and the tokenizer where they are not given",
        ]
    for place, plan in enumerate(found.plans, 1):
        lines += ["", f"# {place}: memory of pipeline rank {plan.worst.rank}, GiB: " + _parts(plan)]
        lines.append(command_of(plan, cluster, flags))
    return "\n".join(lines)


def command_of(plan: Plan, cluster: Cluster, flags: Sequence[str]) -> str:
    """A torchrun command, to be run on each node."""
    nodes = -(-cluster.num_gpus // cluster.gpus_per_node)
    words = ["torchrun", "--nproc-per-node", str(min(cluster.num_gpus, cluster.gpus_per_node))]
    if nodes > 1:
        words += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"]
    return shlex.join([*words, "pretrain_gpt.py", *flags_of(plan, flags)])


def _row(place: int, plan: Plan) -> tuple[str, ...]:
    layout, time, parallel = plan.layout, plan.time, plan.config.parallel
    tokens = plan.config.training.global_batch_size * plan.config.data.seq_length
    return (
        str(place),
        str(layout.pipeline_model_parallel_size),
        str(layout.num_virtual_stages_per_pipeline_rank),
        layout.pipeline_schedule,
        str(layout.tensor_model_parallel_size),
        str(layout.context_parallel_size),
        str(parallel.data_parallel_size),
        str(layout.num_distributed_optimizer_instances),
        str(layout.micro_batch_size),
        layout.recompute_granularity,
        layout.reshard_after_forward,
        f"{plan.worst.total / GIB:.1f}",
        f"{time.seconds:.3f}",
        f"{tokens / time.seconds / parallel.world_size:,.0f}",
        f"{time.tflops:.0f}",
        f"{time.mfu:.1%}",
        f"{time.bubble:.1%}",
        f"{time.exposed / time.seconds:.1%}",
    )


def _summary(found: Found, cluster: Cluster) -> list[str]:
    lines = [
        f"{found.tried:,} layouts held against {cluster.memory_limit / GIB:,.1f} GiB: {found.fitting:,} fit"
    ]
    if found.least_missing is not None:
        size, layout = found.least_missing
        lines[0] += f", {found.too_large:,} do not (the closest needs {size / GIB:,.2f} GiB more:"
        lines[0] += f" {' '.join(layout.flags())})"
    if any(plan.layout.fsdp_cpu_offload for plan in found.plans):
        lines.append("none fits without --fsdp-cpu-offload")
    refused = sorted(found.refused.items(), key=lambda item: -item[1])
    return lines + [f"{count:,} cannot run: {reason}" for reason, count in refused]


def _parts(plan: Plan) -> str:
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.worst.parts.items() if size)
    host = f"; in the node's memory, a GPU: {plan.worst.host / GIB:.2f}" if plan.worst.host else ""
    return parts + host


def _assumptions(cluster: Cluster) -> str:
    device = cluster.device
    return ASSUMED.format(
        efficiency=device.efficiency,
        peak=device.flops / 1e12,
        link=cluster.link_efficiency,
        nvlink=device.nvlink / 1e9,
        network=device.network / 1e9,
        limit=cluster.memory_limit / GIB,
        memory=device.memory / GIB,
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
            "flags": flags_of(plan, flags),
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
    text = {
        "plans": plans,
        "others": others,
        "assumptions": _assumptions(cluster),
        "cluster": asdict(cluster),
    }
    return json.dumps(text, indent=1)


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
    found = search(config, cluster, fixed, own.top, lambda layout: refusal(layout, flags, own.num_gpus))
    if not found.plans:
        raise nothing_fits(found)
    print((as_json if own.json else describe)(found, cluster, flags))


if __name__ == "__main__":
    run(main)
