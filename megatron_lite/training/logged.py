"""What a run logs, a row for each value: the log line, the trackers and tools/report.py read this table."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_lite.config.model import LOSS_NAMES


class Logged(NamedTuple):
    """One value of a step's record.

    key: its name in the record, which metrics.jsonl, TensorBoard and wandb get as it is.
    line: its words in the log line, of the value times `factor`; from ", " on they go on from the row before. A
        value that a record does not have is left out.
    chart, label: heading of its chart in the report, and its own name there.
    line_flag, tracker_flag: the field of LoggingConfig without which the line, or TensorBoard and wandb, leave it out.
    """

    key: str
    line: Callable[[float], str] | None = None
    factor: float = 1
    chart: str = ""
    label: str = ""
    line_flag: str = ""
    tracker_flag: str = ""


def duration(seconds: float) -> str:
    """1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


_TIME, _MEMORY, _IDLE = "Milliseconds per step", "Peak memory, GiB", "Pipeline idle, % of its time"
_MEMORY_FLAG, _TIMERS_FLAG = "log_memory_to_tensorboard", "log_timers_to_tensorboard"
DECOUPLED = "decoupled-learning-rate"  # of embedding and head, with --decoupled-lr
MEMORY = ("memory-bytes", "memory-reserved-bytes")  # a CPU has the first only: resident
EXPERT_LOAD = "expert-load"  # of the layer where it is largest
STARVED = "starved-experts"  # share of all layers' experts
_OF_LAYER = re.compile(r"moe/(.+)_layer_(\d+)")
# In the order of the log line, which is Megatron-LM's; MFU, tokens/s, ETA and what the flags add are ours.
LOGGED = (
    Logged("consumed-samples", "consumed samples: {:12d}".format),
    Logged("iteration-time", "elapsed time per iteration (ms): {:.1f}".format, 1e3, _TIME, "step"),
    Logged("data-wait-time", None, 1e3, _TIME, "waiting for data", tracker_flag=_TIMERS_FLAG),
    Logged(
        "throughput",
        "throughput per GPU (TFLOP/s/GPU): {:.3g}".format,
        chart="TFLOP/s per device",
        label="TFLOP/s",
        line_flag="log_throughput",
    ),
    Logged("mfu", "MFU: {:.1f}%".format, 100, line_flag="log_throughput"),
    Logged("tokens-per-second", "tokens/s: {:,.0f}".format, 1, "Tokens per second", "tokens/s"),
    Logged("eta-seconds", lambda seconds: f"ETA: {duration(seconds)}", tracker_flag=_TIMERS_FLAG),
    Logged("learning-rate", "learning rate: {:.6E}".format, 1, "Learning rate", "learning rate"),
    Logged(DECOUPLED, "decoupled learning rate: {:.6E}".format, 1, "Learning rate", "embedding and head"),
    Logged("batch-size", "global batch size: {:5d}".format, 1, "Batch, samples", "global batch"),
    Logged("lm loss", "lm loss: {:.6E}".format, 1, "Loss", "training"),
    *(
        Logged(name, f"{name}: {{:.6E}}".format, 1, "Losses of the routers", name)
        for name in LOSS_NAMES.values()
    ),
    Logged(
        EXPERT_LOAD,
        "expert load (fullest / mean): {:.2f}".format,
        1,
        "Load of the fullest expert",
        "times mean",
    ),
    Logged(STARVED, "starved experts: {:.1f}%".format, 100, "Experts without a token, %", "of all"),
    Logged("loss-scale", "loss scale: {:.1f}".format),
    Logged("grad-norm", "grad norm: {:.3f}".format, 1, "Gradient norm", "gradient norm"),
    Logged(
        MEMORY[0],
        "peak memory (GiB): {:.2f}".format,
        2.0**-30,
        _MEMORY,
        "allocated (CPU: resident)",
        tracker_flag=_MEMORY_FLAG,
    ),
    Logged(MEMORY[1], ", {:.2f} reserved".format, 2.0**-30, _MEMORY, "reserved", tracker_flag=_MEMORY_FLAG),
    Logged(
        "pipeline-idle-share",
        "pipeline idle (mean, max over ranks): {:.1f}%".format,
        100,
        _IDLE,
        "mean over ranks",
    ),
    Logged("pipeline-idle-share-max", ", {:.1f}%".format, 100, _IDLE, "most"),
    Logged("num-zeros", "num zeros: {:.0f}".format),
    Logged("params-norm", "params norm: {:.3f}".format),
    Logged("skipped-iterations", "number of skipped iterations: {:3d}".format),
    Logged("nan-iterations", "number of nan iterations: {:3d}".format),
)


def name_of_layer(key: str, layer: int) -> str:
    """The name in a record of one layer's value."""
    return f"moe/{key}_layer_{layer}"


def values_of_layers(record: dict[str, Any], key: str) -> dict[int, float]:
    """{layer: value} of what `name_of_layer` named, in the order of layers; empty where a record has none."""
    found = ((_OF_LAYER.fullmatch(name), value) for name, value in record.items())
    mine = {int(match[2]): value for match, value in found if match and match[1] == key}
    return dict(sorted(mine.items()))
