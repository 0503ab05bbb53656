"""Where records go: the console, a JSON-lines file, TensorBoard, Weights & Biases.

A tracker that is missing, down, stuck or out of space never stops or delays a run: TensorBoard and Weights & Biases
run in threads of their own, and what fails is reported once and left out from then on.
"""

import json
import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.training.background import CLOSE_TIMEOUT_S, BackgroundSink, Record, Sink
from megatron_lite.training.logged import LOGGED
from megatron_lite.training.state import TrainState

_CLEAR_LINE = "\r\x1b[2K"


class Tracker:
    """Hands records to every sink; prints lines. Silent on ranks that do not report."""

    def __init__(self, sinks: list[Sink | BackgroundSink], speaks: bool) -> None:
        self._sinks = sinks
        self._speaks = speaks
        self._on_terminal = speaks and sys.stdout.isatty()
        self.wandb_run_id: str | None = None  # to go on with after a restart

    def say(self, line: str) -> None:
        """Print a line of the log; from any thread."""
        if self._speaks:
            print(f"{_CLEAR_LINE if self._on_terminal else ''}{line}\n", end="", flush=True)

    def show(self, line: str) -> None:
        """On a terminal, a line that the next one replaces: where the run is right now."""
        if self._on_terminal:
            width = shutil.get_terminal_size().columns
            print(f"{_CLEAR_LINE}{line[: width - 1]}", end="", flush=True)

    def track(self, record: Record, step: int) -> None:
        """Give a record to every sink."""
        for sink in list(self._sinks):
            self._attempt(sink, lambda sink=sink: sink.track(record, step))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None else 1)

    def close(self, exit_code: int = 0) -> None:
        """Close every sink; those in threads get CLOSE_TIMEOUT_S together. exit_code: how the run ends."""
        behind = [sink for sink in self._sinks if isinstance(sink, BackgroundSink)]
        for sink in list(self._sinks):
            if sink in behind:
                sink.begin_close(exit_code)
            else:
                self._attempt(sink, partial(sink.close, exit_code))
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for sink in behind:
            sink.wait_closed(deadline)
        self._sinks.clear()

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
        self._file = Path(path).open("a+b")  # noqa: SIM115  closed by close()
        if self._file.seekable() and self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # a kill tore the last line: the next record must not join it
                self._file.write(b"\n")

    def track(self, record: Record, step: int) -> None:
        """Append a record with the time of day in seconds."""
        line = {"time": round(time.time(), 3)}
        for key, value in record.items():  # JSON has no NaN
            line[key] = None if isinstance(value, float) and not math.isfinite(value) else value
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self, exit_code: int = 0) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard, under Megatron's names."""

    def __init__(self, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        # A run that is killed leaves without closing: no more than 10 s of points are lost then.
        self._writer = SummaryWriter(config.logging.tensorboard_dir, flush_secs=10)
        self._config = config

    def track(self, record: Record, step: int) -> None:
        """One point a number."""
        for key, value in _shown_numbers(record, self._config).items():
            self._writer.add_scalar(key, value, step)

    def close(self, exit_code: int = 0) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """Weights & Biases; offline without a login or a server. The same run goes on after a restart."""

    def __init__(self, config: Config, run_id: str, resumed: bool, say: Callable[[str], None]) -> None:
        import wandb  # an optional package

        folder = config.logging.wandb_save_dir or config.checkpoint.save or "."
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._config = config
        options = {
            "project": config.logging.wandb_project,
            "entity": config.logging.wandb_entity,
            "name": config.logging.wandb_exp_name,
            "dir": folder,
            "config": config.to_dict(),
            "id": run_id,
            "resume": "allow" if resumed else None,
            "settings": wandb.Settings(init_timeout=60, silent=True),
        }
        why_offline = None
        if not _wandb_has_login(wandb):
            why_offline = "no login in WANDB_API_KEY, ~/.netrc or wandb's settings (`wandb login`)"
        else:
            try:
                self._run = wandb.init(**options)
            except Exception as error:  # noqa: BLE001  a server that is down must not cost the whole run's points
                why_offline = str(error).splitlines()[0]
                wandb.teardown()  # it holds the run's id
        if why_offline:
            say(f"warning: wandb goes offline ({folder}/wandb, `wandb sync` sends it later): {why_offline}")
            self._run = wandb.init(**options, mode="offline")
        # Charts over the iteration: wandb's own step never goes back, so a run that goes on from an older checkpoint
        # would lose every point up to where it had been.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        self._next_step, self._offset = int(getattr(self._run, "step", 0) or 0), None

    def track(self, record: Record, step: int) -> None:
        """Log the numbers of this iteration; wandb's step is the iteration, moved on where a resumed run repeats it."""
        if self._offset is None:
            self._offset = max(0, self._next_step - step)
        self._run.log({**_shown_numbers(record, self._config), "iteration": step}, step=step + self._offset)

    def close(self, exit_code: int = 0) -> None:
        """Finish the run: wandb shows it as failed with another exit code than 0."""
        self._run.finish(exit_code=exit_code)


def _wandb_has_login(wandb: Any) -> bool:
    """Whether wandb would find a login, or is told to want none (WANDB_MODE)."""
    settings = wandb.setup().settings
    if settings.mode not in (None, "online", "run") or settings.api_key:
        return True
    if getattr(settings, "identity_token_file", None):
        return True
    try:
        from wandb.sdk.lib.wbauth import read_netrc_auth
    except ImportError:  # before wandb 0.23
        from wandb.sdk.lib.apikey import api_key

        return bool(api_key(settings))
    return bool(read_netrc_auth(host=settings.base_url))


def _end_wandb_service() -> None:
    """Kill wandb's service process, a child that would go on for minutes and keep our output open (`run | tee log`)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name.startswith("wandb") and int(rest.split()[1]) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGKILL)


class ProgressLog:
    """--log-progress: SAVE/progress.txt, a line at each start and save, as Megatron-LM writes it."""

    def __init__(self, config: Config, environment: Environment) -> None:
        on = config.logging.log_progress and config.checkpoint.save and environment.rank == 0
        self._path = Path(config.checkpoint.save) / "progress.txt" if on else None
        self._environment = environment
        self._started, self._flops_at_start = time.monotonic(), 0.0

    def append(self, text: str) -> None:
        """Time, job, number of processes, text."""
        if self._path is None:
            return
        environment, now = self._environment, time.strftime("%Y-%m-%d %H:%M:%S")
        job = environment.slurm_job_id or environment.run_id or ""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{now}\tJob ID: {job}\t# GPUs: {environment.world_size}\t{text}\n")
        except OSError as error:
            self._path = None
            print(f"warning: --log-progress stops: {error}", flush=True)

    def started(self, state: TrainState) -> None:
        """The run (re)starts here."""
        self._flops_at_start = state.flops
        self.append(f"Starting job\tIteration: {state.iteration}")

    def saved(self, state: TrainState) -> None:
        """A checkpoint was saved."""
        seconds = time.monotonic() - self._started
        rate = (state.flops - self._flops_at_start) / seconds / self._environment.world_size / 1e12
        self.append(
            f"Saved checkpoint\tIteration: {state.iteration}\tJob throughput: {rate:.3g} TFLOP/s/GPU\t"
            f"Floating-point operations: {state.flops:.2e}\tTokens (in billions): {state.consumed_tokens / 1e9:.4g}"
        )


def build_tracker(config: Config, environment: Environment, run_id: str | None) -> Tracker:
    """The sinks that the flags name, on rank 0; elsewhere a silent tracker.

    Args:
        run_id: the run's id at Weights & Biases before a restart.
    """
    if environment.rank != 0:
        return Tracker([], speaks=False)
    logging, save = config.logging, config.checkpoint.save
    sinks: list[Sink | BackgroundSink] = []
    tracker = Tracker(sinks, speaks=True)
    path = logging.metrics_file or (f"{save}/metrics.jsonl" if save and "://" not in save else None)
    if path is not None:
        try:
            sinks.append(JsonLines(path))
        except OSError as error:
            tracker.say(f"warning: {JsonLines.name} cannot be used, the run goes on without it: {error}")
    if logging.tensorboard_dir is not None:
        sinks.append(BackgroundSink("TensorBoard", lambda: TensorBoardSink(config), tracker.say))
    if logging.wandb_project is not None:
        # The id is made here: the checkpoints' state needs it, and wandb's own start must hold nobody up.
        number = run_id or environment.wandb_run_id or secrets.token_hex(4)
        tracker.wandb_run_id, resumed = number, run_id is not None
        build = lambda: WandbSink(config, number, resumed, tracker.say)  # noqa: E731
        sinks.append(BackgroundSink("wandb", build, tracker.say, abandon=_end_wandb_service))
    return tracker


def _shown_numbers(record: Record, config: Config) -> dict[str, float]:
    """The numbers but those that TensorBoard and wandb get by a flag only; the metrics file has everything."""
    hidden = {row.key for row in LOGGED if row.tracker_flag and not getattr(config.logging, row.tracker_flag)}
    return {k: value for k, value in record.items() if isinstance(value, int | float) and k not in hidden}
