"""Where records go: the console, a JSON-lines file, TensorBoard, Weights & Biases.

A tracker that is missing, down or out of space never stops a run: it is reported once and left out from then on.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megatron_lite.config import Config
from megatron_lite.environment import Environment, set_default
from megatron_lite.training.state import TrainState

Record = dict[str, Any]
_CLEAR_LINE = "\r\x1b[2K"


class Sink(Protocol):
    """One place for records."""

    name: str

    def track(self, record: Record, step: int) -> None:
        """Keep one record."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class Tracker:
    """Hands records to every sink; prints lines. Silent on ranks that do not report."""

    def __init__(self, sinks: list[Sink], speaks: bool) -> None:
        self._sinks = sinks
        self._speaks = speaks
        self._on_terminal = speaks and sys.stdout.isatty()

    def say(self, line: str) -> None:
        """Print a line of the log."""
        if self._speaks:
            print(f"{_CLEAR_LINE if self._on_terminal else ''}{line}", flush=True)

    def show(self, line: str) -> None:
        """On a terminal, a line that the next one replaces: where the run is right now."""
        if self._on_terminal:
            width = shutil.get_terminal_size().columns
            print(f"{_CLEAR_LINE}{line[: width - 1]}", end="", flush=True)

    def track(self, record: Record, step: int) -> None:
        """Give a record to every sink."""
        for sink in list(self._sinks):
            self._attempt(sink, lambda sink=sink: sink.track(record, step))

    def close(self) -> None:
        """Close every sink."""
        for sink in list(self._sinks):
            self._attempt(sink, sink.close)
        self._sinks.clear()

    @property
    def wandb_run_id(self) -> str | None:
        """The run's id at Weights & Biases, to go on with after a restart."""
        return next((sink.run_id for sink in self._sinks if isinstance(sink, WandbSink)), None)

    def _attempt(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  a tracker must never stop a run
            self._sinks.remove(sink)
            self.say(f"warning: {sink.name} failed and is left out from here on: {error}")


class JsonLines:
    """A file with one JSON object a line: always there, needs nothing, read by the report tool."""

    name = "the metrics file"

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def track(self, record: Record, step: int) -> None:
        """Append a record with the time of day in seconds."""
        valid = {
            key: None if _is_not_finite(value) else value for key, value in record.items()
        }  # JSON has no NaN
        self._file.write(json.dumps({"time": round(time.time(), 3), **valid}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard, under Megatron's names."""

    name = "TensorBoard"

    def __init__(self, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        self._writer = SummaryWriter(config.logging.tensorboard_dir)
        self._hidden = _hidden_names(config)

    def track(self, record: Record, step: int) -> None:
        """One point a number."""
        for key, value in _numbers(record, self._hidden).items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """Weights & Biases; offline when there is no key. The same run goes on after a restart."""

    name = "wandb"

    def __init__(self, config: Config, environment: Environment, run_id: str | None) -> None:
        import wandb  # an optional package

        if not environment.wandb_key_present:
            set_default("WANDB_MODE", "offline")
        folder = config.logging.wandb_save_dir or config.checkpoint.save or "."
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._hidden = _hidden_names(config)
        self._run = wandb.init(
            project=config.logging.wandb_project,
            entity=config.logging.wandb_entity,
            name=config.logging.wandb_exp_name,
            dir=folder,
            config=config.to_dict(),
            id=run_id,
            resume="allow" if run_id else None,
            settings=wandb.Settings(init_timeout=60, silent=True),
        )
        self.run_id = self._run.id

    def track(self, record: Record, step: int) -> None:
        """Log the numbers at this step."""
        self._run.log(_numbers(record, self._hidden), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class ProgressLog:
    """--log-progress: SAVE/progress.txt, a line at each start and save, as Megatron-LM writes it."""

    def __init__(self, config: Config, environment: Environment) -> None:
        on = config.logging.log_progress and config.checkpoint.save and environment.rank == 0
        self._path = Path(config.checkpoint.save) / "progress.txt" if on else None
        self._job = environment.slurm_job_id or environment.run_id or ""
        self._num_processes = environment.world_size
        self._started = time.monotonic()
        self._flops_at_start: float | None = None

    def append(self, text: str) -> None:
        """Time, job, number of processes, text."""
        if self._path is None:
            return
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\tJob ID: {self._job}\t# GPUs: {self._num_processes}\t{text}\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._path = None
            print(f"warning: --log-progress stops: {error}", flush=True)

    def started(self, state: TrainState) -> None:
        """The run (re)starts here."""
        self._flops_at_start = state.flops
        self.append(f"Starting job\tIteration: {state.iteration}")

    def saved(self, state: TrainState) -> None:
        """A checkpoint was saved."""
        done = state.flops - (self._flops_at_start or 0.0)
        rate = done / (time.monotonic() - self._started) / self._num_processes / 1e12
        self.append(
            f"Saved checkpoint\tIteration: {state.iteration}\tJob throughput: {rate:.3g} TFLOP/s/GPU\t"
            f"Floating-point operations: {state.flops:.2e}\tTokens (in billions): {state.consumed_tokens / 1e9:.4g}"
        )


def build_tracker(config: Config, environment: Environment, run_id: str | None) -> Tracker:
    """The sinks that the flags name, on rank 0; elsewhere a silent tracker."""
    if environment.rank != 0:
        return Tracker([], speaks=False)
    tracker = Tracker([], speaks=True)
    logging, save = config.logging, config.checkpoint.save
    path = logging.metrics_file or (f"{save}/metrics.jsonl" if save and "://" not in save else None)
    wanted: list[tuple[bool, str, Callable[[], Sink]]] = [
        (path is not None, JsonLines.name, lambda: JsonLines(path)),
        (logging.tensorboard_dir is not None, TensorBoardSink.name, lambda: TensorBoardSink(config)),
        (logging.wandb_project is not None, WandbSink.name, lambda: WandbSink(config, environment, run_id)),
    ]
    for asked, name, build in wanted:
        if not asked:
            continue
        try:
            tracker._sinks.append(build())
        except Exception as error:  # noqa: BLE001  a tracker must never stop a run
            tracker.say(f"warning: {name} cannot be used, the run goes on without it: {error}")
    return tracker


def _numbers(record: Record, hidden: frozenset[str]) -> dict[str, float]:
    return {
        key: value for key, value in record.items() if isinstance(value, int | float) and key not in hidden
    }


def _hidden_names(config: Config) -> frozenset[str]:
    """What the trackers get only when a flag asks for it; the metrics file has everything."""
    hidden = set()
    if not config.logging.log_memory_to_tensorboard:
        hidden |= {"memory-bytes", "memory-reserved-bytes"}
    if not config.logging.log_timers_to_tensorboard:
        hidden |= {"data-wait-time", "eta-seconds"}
    return frozenset(hidden)


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
