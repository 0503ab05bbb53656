"""What a run will be, as text: `pretrain_gpt.py --check --world-size N FLAGS`. Imports no torch."""

from bisect import bisect_left
from pathlib import Path

from megatron_lite.arithmetic.batch_size import BatchSchedule, pass_size
from megatron_lite.arithmetic.costs import ModelCosts, model_costs
from megatron_lite.arithmetic.flops import flops_per_step
from megatron_lite.arithmetic.lr_schedule import LearningRateSchedule
from megatron_lite.arithmetic.mesh_sizes import mesh_sizes
from megatron_lite.arithmetic.partition import (
    StagePlan,
    describe,
    plan_from_config,
    stage_compute,
    stage_parameters,
)
from megatron_lite.arithmetic.pipeline_schedule import (
    DeadlockError,
    StageTimes,
    build_schedule,
    peak_in_flight,
    placement_of,
    runnable_schedule,
    simulate,
)
from megatron_lite.arithmetic.vocabulary import KNOWN_VOCABULARIES, known_vocabulary, with_vocabulary
from megatron_lite.config import Config, ModelConfig

# fp32 weight, gradient, and Adam's two averages (sgd and muon keep less).
_BYTES_PER_PARAMETER = 16
_MOST_ACTIONS = 400_000
_PLOT_WIDTH, _PLOT_HEIGHT = 64, 10


def describe_run(config: Config) -> str:
    """The resolved run: model, layout, batch, length, FLOPs, learning rate, notes. One paragraph each."""
    config, vocabulary = _with_known_vocabulary(config)
    plans = plan_from_config(config)
    costs = model_costs(config.model, config.data.seq_length)
    batches = BatchSchedule.from_config(config)
    parts = [
        _model(config, costs, vocabulary),
        _layout(config, plans, costs, batches),
        _length(config, batches),
        learning_rate_curve(LearningRateSchedule.from_config(config), batches),
    ]
    if config.notes:
        parts.append("Notes\n" + "\n".join(f"  {note}" for note in config.notes))
    return "\n\n".join(parts)


def start_banner(config: Config, plans: list[StagePlan]) -> str:
    """What a run prints when it starts, in a few lines: model, layout, stages, length, where it saves."""
    model, parallel, save = config.model, config.parallel, config.checkpoint
    costs, batches = model_costs(model, config.data.seq_length), BatchSchedule.from_config(config)
    samples, total = batches.total_samples, batches.total_iterations
    batch = " to ".join(f"{size:,}" for size in dict.fromkeys(batches.steps[n][1] for n in (0, -1)))
    warmup = bisect_left(
        range(total), LearningRateSchedule.from_config(config).warmup_samples, key=batches.samples_after
    )
    interval = f"every {save.save_interval:,} steps and " if save.save_interval else ""
    return "\n".join(
        (
            f"model: {costs.parameters:,} parameters{_active(costs)}, {model.num_layers} layers of "
            f"{model.hidden_size}, vocabulary {model.padded_vocab_size:,}, {config.data.seq_length:,} tokens a sample",
            f"layout: {parallel.world_size:,} ranks: {_axes(config)}; {_schedule(config)}",
            describe(plans, costs),
            f"run: {total:,} steps of {batch} samples, {samples:,} samples, {samples * config.data.seq_length:,} "
            f"tokens, learning rate {config.optimizer.lr:g} after {warmup:,} steps of warm-up",
            f"checkpoints: {interval}at the end in {save.save}"
            if save.save
            else "checkpoints: none (no --save)",
        )
    )


def _with_known_vocabulary(config: Config) -> tuple[Config, str]:
    """The config with a padded vocabulary, as far as the flags alone tell it, and a line about it."""
    size = known_vocabulary(config)
    assumed = (
        config.model.vocab_size is None
        and config.model.padded_vocab_size is None
        and size == KNOWN_VOCABULARIES.get(config.data.tokenizer_type)
    )
    if size is None:
        # Rows that are not there: the tokenizer's files, which a check does not open, decide about them.
        config = with_vocabulary(config, 0)
        return config, "set by the tokenizer, not known here (--vocab-size N): counted as 0 below"
    config = with_vocabulary(config, size)
    origin = ""
    if assumed:
        file = config.data.vocab_file if config.data.tokenizer_type == "GPT2BPETokenizer" else None
        here = file is None or Path(file).is_file()
        absent = "" if here else f": assumed, --vocab-file {file} is not here"
        origin = f" ({config.data.tokenizer_type}'s own{absent})"
    return config, f"{size:,} tokens{origin}, padded to {config.model.padded_vocab_size:,}"


def _model(config: Config, costs: ModelCosts, vocabulary: str) -> str:
    model = config.model
    heads = f"{model.num_attention_heads} heads of {model.kv_channels}"
    if model.num_query_groups != model.num_attention_heads:
        heads += f" ({model.num_query_groups} key/value)"
    total, embedding = costs.parameters, costs.embedding.parameters
    head = 0 if costs.shared_parameters else model.padded_vocab_size * model.hidden_size
    tied = "tied" if costs.shared_parameters else f"{head:,}"
    return "\n".join(
        (
            "Model",
            f"  shape        {model.num_layers} layers, hidden {model.hidden_size}, {heads}, {_mlp(model)}, "
            f"{model.normalization}, positions {model.position_embedding_type}",
            f"  vocabulary   {vocabulary}",
            f"  parameters   {total:,}{_active(costs)} = embedding {embedding:,} + {_blocks(costs)} + final norm "
            f"{costs.head.parameters - head:,} + head {tied}",
        )
    )


def _mlp(model: ModelConfig) -> str:
    """What a layer has behind its attention, in words."""
    activation = f"({model.activation_name.replace('_', ' ')})"
    mixtures = sum(map(model.has_experts, range(model.num_layers)))
    parts = [f"MLP {model.ffn_hidden_size} {activation}"] if mixtures < model.num_layers else []
    if mixtures:
        parts.append(
            f"{model.num_experts} experts of {model.moe_ffn_hidden_size} {activation}, {model.moe_router_topk} a token"
        )
        shared = model.moe_shared_expert_intermediate_size
        parts += [f"shared expert of {shared}"] if shared else []
    return ", ".join(parts)


def _active(costs: ModelCosts) -> str:
    return "" if costs.active == costs.parameters else f" ({costs.active:,} active)"


def _blocks(costs: ModelCosts) -> str:
    """'blocks 32 x 218,112,000', dense ones and mixtures apart, of one of these also what is active."""
    kinds = [
        (name, [layer for layer in costs.layers if bool(layer.experts) == mixture])
        for name, mixture in (("dense blocks", False), ("mixtures", True))
    ]
    there = [(name, layers) for name, layers in kinds if layers]
    if there[0][1] == list(costs.layers) and not costs.layers[0].experts:
        there = [("blocks", costs.layers)]
    return " + ".join(
        f"{name} {len(layers)} x {layers[0].parameters:,}"
        + (f" ({layers[0].active:,} active)" if layers[0].idle else "")
        for name, layers in there
    )


def _layout(config: Config, plans: list[StagePlan], costs: ModelCosts, batches: BatchSchedule) -> str:
    parallel, sizes = config.parallel, mesh_sizes(config.parallel)
    ranks = range(parallel.pipeline_model_parallel_size)
    held = [sum(stage_parameters(p, costs) for p in plans if p.rank == rank) for rank in ranks]
    most = max(held) / (sizes["tp"] * sizes["dp_shard"] * sizes["cp"])
    microbatches = batches.num_microbatches(batches.total_samples)
    lines = [
        f"Layout of {parallel.world_size:,} processes",
        f"  axes         {_axes(config)}",
        f"  schedule     {_schedule(config)}, {microbatches:,} microbatches",
        f"  a rank holds about {most:,.0f} parameters at most, "
        f"{most * _BYTES_PER_PARAMETER / 2**30:,.2f} GiB with fp32 gradients and Adam state",
    ]
    lines += ["  " + line for line in describe(plans, costs).splitlines()]
    if len(ranks) > 1:
        lines += _pipeline(config, plans, costs, microbatches)
    return "\n".join(lines)


def _axes(config: Config) -> str:
    sizes, data = mesh_sizes(config.parallel), config.parallel.data_parallel_size
    expert = config.parallel.expert_model_parallel_size
    experts = f", experts over {expert}" if expert > 1 else ""
    return (
        f"pipeline {sizes['pp']} x data {data} (replicas {sizes['dp_replicate']} x shards {sizes['dp_shard']}) x "
        f"context {sizes['cp']} x tensor {sizes['tp']}{experts}"
    )


def _schedule(config: Config) -> str:
    chunks = config.parallel.num_virtual_stages_per_pipeline_rank
    return f"{config.parallel.pipeline_schedule}, {chunks} chunk{'s' if chunks > 1 else ''} a rank"


def _pipeline(config: Config, plans: list[StagePlan], costs: ModelCosts, microbatches: int) -> list[str]:
    """Idle share and activations in flight, by simulating the schedule with the stages' counted FLOPs."""
    parallel = config.parallel
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    count = pass_size(microbatches, parallel.max_microbatches_per_step)
    if size * chunks * count > _MOST_ACTIONS:
        return ["  bubble       not simulated: the schedule has too many actions"]
    work = [stage_compute(plan, costs) for plan in plans]
    mean = sum(work) / len(work) or 1
    third = tuple(flops / mean for flops in work)
    schedule = build_schedule(runnable_schedule(parallel.pipeline_schedule, size, count), size, count, chunks)
    try:
        timeline = simulate(
            schedule, StageTimes(third, third, third), placement_of(parallel.pipeline_schedule)
        )
    except DeadlockError as error:  # torch's order, so ours to know
        raise AssertionError(f"the schedule cannot be run: {error}") from error
    flight = ", ".join(f"{peak_in_flight(actions):g}" for actions in schedule[:8])
    more = ", ..." if size > 8 else ""
    return [
        f"  bubble       {timeline.bubble_fraction:.1%} of the ranks' time, by counted FLOPs and free communication",
        f"  in flight    {flight}{more} microbatches' activations at most, by rank (of one chunk each)",
    ]


def _length(config: Config, batches: BatchSchedule) -> str:
    training, seq_length = config.training, config.data.seq_length
    samples, iterations = batches.total_samples, batches.total_iterations
    flops = flops_per_step(config, 1) * samples
    lines = ["Run"]
    for first, size in _shown_steps(batches):
        begin = f"from sample {first:,} on: " if len(batches.steps) > 1 else ""
        lines.append(
            f"  batch        {begin}{size:,} samples = {size * seq_length:,} tokens a step "
            f"({size // batches.samples_per_microbatch:,} microbatches of {training.micro_batch_size} x "
            f"{config.parallel.data_parallel_size} data-parallel ranks)"
        )
        if first == -1:
            lines[-1] = f"  batch        ... {len(batches.steps) - 4} more steps ..."
    lines += [
        f"  length       {iterations:,} steps, {samples:,} samples, {samples * seq_length:,} tokens",
        f"  work         {flops:.3e} FLOPs ({flops_per_step(config, batches.steps[-1][1]):.3e} a step"
        + (" of the last size" if len(batches.steps) > 1 else "")
        + ")",
    ]
    evaluation = config.evaluation
    if evaluation.eval_interval and (evaluation.eval_iters or evaluation.full_validation):
        each = "the whole set" if evaluation.full_validation else f"{evaluation.eval_iters} batches"
        lines.append(f"  validation   every {evaluation.eval_interval:,} steps, {each}")
    return "\n".join(lines)


def _shown_steps(batches: BatchSchedule) -> list[tuple[int, int]]:
    """The first and last two steps of a long batch schedule; a first sample of -1 stands for those between."""
    steps = list(batches.steps)
    return steps if len(steps) <= 5 else [*steps[:2], (-1, 1), *steps[-2:]]


def learning_rate_curve(schedule: LearningRateSchedule, batches: BatchSchedule) -> str:
    """The learning rate over the run as a small plot, and its values at a few steps."""
    iterations = batches.total_iterations
    if iterations == 0:
        return "Learning rate\n  no steps"

    def rate(iteration: int) -> float:
        return schedule.learning_rate(batches.samples_after(iteration))

    width = min(_PLOT_WIDTH, iterations)
    columns = [round(position * (iterations - 1) / max(1, width - 1)) for position in range(width)]
    rates = [rate(iteration) for iteration in columns]
    top = max(rates)
    heights = [round(value / top * (_PLOT_HEIGHT - 1)) if top else 0 for value in rates]
    lines = ["Learning rate"]
    for height in reversed(range(_PLOT_HEIGHT)):
        label = f"{top * height / (_PLOT_HEIGHT - 1):10.3e}" if height in (0, _PLOT_HEIGHT - 1) else ""
        row = "".join("*" if at == height else " " for at in heights)
        lines.append(f"  {label:>10} |{row}".rstrip())
    lines.append(f"  {'':>10} +{'-' * width}")
    lines.append(f"  {'step':>10}  1{iterations:>{max(1, width - 1)},}")
    if (schedule.decoupled_lr, schedule.decoupled_min_lr) != (schedule.lr, schedule.min_lr):
        lines.append(
            f"  embedding and head: at most {schedule.decoupled_lr:.6e}, at least {schedule.decoupled_min_lr:.6e}"
        )
    marks = {0, 1, iterations // 100, iterations // 10, iterations // 2, iterations - 1}
    marks = sorted(mark for mark in marks if mark < iterations)
    lines += [f"  step {mark + 1:>12,}  lr {rate(mark):.6e}" for mark in marks]
    return "\n".join(lines)
