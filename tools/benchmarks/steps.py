"""Whole training steps of ours against scripts that use torch's own classes and no more: their time, their memory.

A Contest says who takes part and what ours is held to; another comparison of steps is another Contest.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_lite.arithmetic.pipeline_layout import write_layout
from megatron_lite.parallel import experts as exchange
from megatron_lite.rehearsal.accounting import Accounting
from tools.benchmarks import scripts
from tools.benchmarks.baseline_model import QUICK, Sizes, random_batches
from tools.benchmarks.comparison import Options, Row, Table, fastest, refuse_unlike, row_of, speed, take_turns
from tools.benchmarks.ours import our_step, transformers_step
from tools.benchmarks.ranks import run_ranks, timed
from tools.benchmarks.scripts import Job, Step

BATCHES = 4  # taken again and again: the loss falls, so a step that were left out would show in it
BARE, RECOMPUTED, LLAMA = "bare", "bare, each block under checkpoint", "transformers' Llama"
MIXTRAL, MIXTRAL_EAGER = "transformers' Mixtral, grouped_mm", "transformers' Mixtral, eager"
FULLY_SHARD, DDP = "torch fully_shard", "torch DDP"
ONE_F_ONE_B, INTERLEAVED = "torch Schedule1F1B", "torch ScheduleInterleaved1F1B"
PP, CHUNKS = "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OPERATORS = "--recompute-granularity selective --recompute-modules core_attn layernorm mlp"
NO_SHARD = "--data-parallel-sharding-strategy no_shard"
CHUNKED = "--cross-entropy-loss-fusion"
SPREAD, EP = "torch fully_shard, all-to-all by hand", "--expert-model-parallel-size 2"
BOTH = f"{FULL} {CHUNKED}"


@dataclass(frozen=True)
class Entry:
    """A contestant: what builds its step (a top-level function or a partial of one), and its rows of the table.

    against: baseline -> what is wanted of the ratio, None for nothing; one that does not take part has no row.
    """

    build: Callable[[Job], Step]
    against: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """Contestants that take the same steps in the same processes.

    Args:
        ranks: processes, of which `copies` are data-parallel ranks with their own samples.
        microbatches: of a data-parallel rank's step.
        turn: steps of a turn.
    """

    title: str
    sizes: Sizes
    entries: Mapping[str, Entry]
    ranks: int = 1
    copies: int = 1
    microbatches: int = 1
    turn: int = 2

    @property
    def threads(self) -> int:
        """Of each rank: one process has the machine's two cores, in its smallest form one."""
        return 2 if self.ranks == 1 and self.sizes.hidden > QUICK.hidden else 1

    def rows(self, row: Callable[[str, str, float | None], Row]) -> list[Row]:
        """row(contestant, its baseline, what is wanted) of each pair."""
        return [
            row(name, baseline, wanted)
            for name, entry in self.entries.items()
            for baseline, wanted in entry.against.items()
            if baseline in self.entries
        ]

    def job(self) -> Job:
        """What this rank does."""
        samples = self.microbatches * self.sizes.micro_batch
        first = samples * dist.get_rank() if self.copies > 1 else 0
        whole = random_batches(self.sizes, self.copies * samples, BATCHES)
        mine = [{key: t[first : first + samples] for key, t in batch.items()} for batch in whole]
        return Job(self.sizes, mine, self.microbatches, self.copies * samples)

    def facts(self) -> str:
        """Sizes in words."""
        return (
            f"{self.sizes}, {self.ranks} ranks of {self.threads} threads, {self.microbatches} microbatches a "
            f"data-parallel rank, fp32, AdamW; the losses are equal."
        )


def race(contest: Contest, repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """On every rank: seconds of each contestant's turns, and the loss of its last step."""
    job, losses = contest.job(), {}
    steps = {name: entry.build(job) for name, entry in contest.entries.items()}

    def turn(name: str) -> None:
        for _ in range(contest.turn):
            losses[name] = steps[name]()

    return take_turns({name: timed(partial(turn, name)) for name in steps}, repeats), losses


def race_table(contest: Contest, options: Options) -> Table:
    """Speeds as shares of the baselines'."""
    seconds, losses = run_ranks(race, contest.ranks, contest, options.repeats, threads=contest.threads)[0]
    refuse_unlike("the last loss", losses)
    rows = contest.rows(lambda name, baseline, wanted: speed(name, seconds, baseline, wanted))
    shortest = f"Fastest step, ms: {fastest(seconds, 1000 / contest.turn)}."
    return Table(contest.title, rows, [contest.facts(), shortest])


def weigh(contest: Contest) -> tuple[dict[str, int], dict[str, float]]:
    """On every rank: the most bytes of tensors alive at once in each contestant's second step, and its loss."""
    peaks, losses, job = {}, {}, contest.job()
    for name, entry in contest.entries.items():
        with Accounting({}) as counted:
            step = entry.build(job)
            step()
            counted.start()
            losses[name] = step()
        peaks[name] = counted.peak
    return peaks, losses


def weigh_table(contest: Contest) -> Table:
    """Peak bytes as shares of the baselines', on the rank that holds most."""
    answers = run_ranks(weigh, contest.ranks, contest)
    refuse_unlike("the last loss", answers[0][1])
    peaks = {name: max(mine[name] for mine, _ in answers) for name in answers[0][0]}
    rows = contest.rows(
        lambda name, baseline, wanted: row_of(name, baseline, [peaks[name] / peaks[baseline]], None, wanted)
    )
    held = ", ".join(f"{name} {peak / 2**20:.1f}" for name, peak in peaks.items())
    facts = [
        contest.facts(),
        "The second step, with weights and optimizer state; bytes counted, below 1: ours holds less.",
        f"The most on a rank, MiB: {held}.",
    ]
    return Table(f"Peak bytes: {contest.title}", rows, facts)


def peers(options: Options, builds: Mapping[str, Callable[[Job], Step]]) -> dict[str, Entry]:
    """transformers' models as contestants, none unless --peers asks for them and the package is there."""
    asked = options.peers and importlib.util.find_spec("transformers")
    return {name: Entry(build) for name, build in builds.items()} if asked else {}


def step(options: Options) -> list[Table]:
    """One process: a training step against a bare PyTorch loop, and transformers' model."""
    sizes = QUICK if options.quick else Sizes()
    entries = {BARE: Entry(scripts.bare), "ours": Entry(our_step, {BARE: 0.97, LLAMA: 1.0})}
    entries |= peers(options, {LLAMA: transformers_step})
    title = f"step: one process, {{}} x {sizes.micro_batch} x {sizes.seq_length} tokens, fp32"
    contests = [Contest(title.format(n), sizes, entries, microbatches=n) for n in (1, 4)]
    return [race_table(contest, options) for contest in contests]


def experts(options: Options) -> list[Table]:
    """A mixture of experts on one process: time and peak bytes against a bare loop with grouped_mm, and peers."""
    sizes = replace(QUICK if options.quick else Sizes(layers=4), experts=8)
    forms = {MIXTRAL: "grouped_mm", MIXTRAL_EAGER: "eager"}
    builds = {name: partial(transformers_step, experts=form) for name, form in forms.items()}
    wanted = {BARE: 0.97, MIXTRAL: 1.0, MIXTRAL_EAGER: 1.0}
    entries = {BARE: Entry(scripts.bare), "ours": Entry(our_step, wanted)} | peers(options, builds)
    title = f"experts: one process, {sizes.experts} experts, {sizes.chosen} of a token"
    held = {BARE: entries[BARE], "ours": Entry(our_step, {BARE: 1.0})}
    return [race_table(Contest(title, sizes, entries), options), weigh_table(Contest(title, sizes, held))]


def expert_parallel(options: Options) -> list[Table]:
    """A mixture whose experts lie on two ranks: against FSDP alone and a minimal script; the exchange's share."""
    sizes = replace(QUICK if options.quick else Sizes(layers=4), experts=8)
    entries = {
        SPREAD: Entry(scripts.experts_spread),
        "ours, FSDP alone": Entry(our_step),
        "ours, ep 2": Entry(partial(our_step, flags=EP), {SPREAD: 0.95, "ours, FSDP alone": 0.95}),
    }
    contest = Contest(
        f"Expert parallel on 2 ranks, {sizes.experts} experts", sizes, entries, ranks=2, copies=2
    )
    shares = run_ranks(waiting, 2, contest)
    share = f"Waiting for rows and counts, share of a step of ep 2: {', '.join(f'{s:.1%}' for s in shares)}."
    table = race_table(contest, options)
    return [replace(table, facts=[*table.facts, share])]


def waiting(contest: Contest) -> float:
    """On every rank: the share of a step that it waits for other ranks' rows of experts."""
    waited: list[float] = []
    for owner, name in ((exchange._Message, "arrived"), (exchange.Exchange, "exchange_counts")):
        setattr(owner, name, _clocked(getattr(owner, name), waited))
    step = contest.entries["ours, ep 2"].build(contest.job())
    step()
    waited.clear()
    started = time.perf_counter()
    for _ in range(2 * contest.turn):
        step()
    return sum(waited) / (time.perf_counter() - started)


def _clocked(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments)
        seconds.append(time.perf_counter() - started)
        return result

    return run


def on_ranks(options: Options, contest: Callable[[Sizes, int, float | None], Contest]) -> list[Table]:
    """contest(sizes, ranks, share of the script's speed that is wanted) on 2 and 4 ranks."""
    sizes = replace(QUICK, layers=4) if options.quick else Sizes()
    wanted = {2: 0.95} if options.quick else {2: 0.95, 4: None}
    return [race_table(contest(sizes, ranks, share), options) for ranks, share in wanted.items()]


def fsdp(options: Options) -> list[Table]:
    """FSDP and DDP-like steps on 2 and 4 ranks against minimal scripts with torch's own classes."""

    def contest(sizes: Sizes, ranks: int, wanted: float | None) -> Contest:
        entries = {
            FULLY_SHARD: Entry(scripts.sharded),
            "ours, sharded": Entry(our_step, {FULLY_SHARD: wanted}),
            DDP: Entry(scripts.replicated, {FULLY_SHARD: None}),
            "ours, no_shard": Entry(partial(our_step, flags=NO_SHARD), {DDP: wanted}),
        }
        return Contest(f"Data parallel on {ranks} ranks", sizes, entries, ranks, copies=ranks)

    return on_ranks(options, contest)


def pipeline_entries(sizes: Sizes, ranks: int, wanted: float | None) -> dict[str, Entry]:
    """torch's schedules, and ours with the scripts' even split."""

    def even(stages: int) -> Callable[[Job], Step]:
        layout = write_layout([sizes.layers // stages] * stages)
        return partial(our_step, flags=f"{PP} {ranks} --pipeline-model-parallel-layout {layout}")

    return {
        ONE_F_ONE_B: Entry(partial(scripts.pipelined, chunks=1)),
        "ours, 1f1b, same split": Entry(even(ranks), {ONE_F_ONE_B: wanted}),
        INTERLEAVED: Entry(partial(scripts.pipelined, chunks=2), {ONE_F_ONE_B: None}),
        "ours, interleaved, same split": Entry(even(2 * ranks), {INTERLEAVED: wanted}),
    }


def pipeline(options: Options) -> list[Table]:
    """Pipeline steps (1F1B, interleaved) on 2 and 4 ranks against minimal scripts with torch's own classes.

    The scripts cut the layers evenly; ours weighs the head when it cuts, and is also run with the scripts' split.
    """

    def contest(sizes: Sizes, ranks: int, wanted: float | None) -> Contest:
        own = {"ours, 1f1b": (ONE_F_ONE_B, ""), "ours, interleaved": (INTERLEAVED, CHUNKS)}
        entries = pipeline_entries(sizes, ranks, wanted) | {
            name: Entry(partial(our_step, flags=f"{PP} {ranks} {flags}"), {baseline: wanted})
            for name, (baseline, flags) in own.items()
        }
        return Contest(f"Pipeline of {ranks} ranks", sizes, entries, ranks, microbatches=2 * ranks, turn=1)

    return on_ranks(options, contest)


def memory(options: Options) -> list[Table]:
    """Peak bytes of a step, counted: ours against the bare loop and torch's classes, with and without recompute."""
    # Long enough that activations and logits, not weights, are what is seen; small chunks need 1,024 tokens and more.
    sizes = replace(QUICK, layers=4, seq_length=256, micro_batch=8) if options.quick else Sizes(micro_batch=8)
    one_process = {
        BARE: Entry(scripts.bare),
        RECOMPUTED: Entry(partial(scripts.bare, recompute=True)),
        "ours": Entry(our_step, {BARE: 1.02}),
        "ours, recompute full": Entry(partial(our_step, flags=FULL), {RECOMPUTED: 1.02}),
        "ours, recompute core_attn, layernorm, mlp": Entry(partial(our_step, flags=OPERATORS), {BARE: None}),
        "ours, loss in chunks": Entry(partial(our_step, flags=CHUNKED), {BARE: None}),
        "ours, recompute full, loss in chunks": Entry(partial(our_step, flags=BOTH), {RECOMPUTED: None}),
    }
    never = "--reshard-after-forward never"
    data_parallel = {
        FULLY_SHARD: Entry(scripts.sharded),
        DDP: Entry(scripts.replicated),
        "ours, sharded": Entry(our_step, {FULLY_SHARD: 1.02}),
        "ours, sharded, reshard never": Entry(partial(our_step, flags=never), {FULLY_SHARD: None}),
        "ours, no_shard": Entry(partial(our_step, flags=NO_SHARD), {DDP: None}),
    }
    stages = replace(sizes, micro_batch=4)
    contests = [
        Contest("One process", sizes, one_process),
        Contest("Data parallel on 2 ranks", sizes, data_parallel, ranks=2, copies=2),
        Contest("Pipeline of 2 ranks", stages, pipeline_entries(stages, 2, 1.02), ranks=2, microbatches=4),
    ]
    return [weigh_table(contest) for contest in contests]
