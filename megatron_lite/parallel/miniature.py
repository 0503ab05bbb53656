"""A run's layout with a small model: what a proof or a rehearsal can hold on any machine. Imports no torch.

Kept: every axis, the schedule, stages that differ in their number of layers, grouped heads, the kinds of norm, MLP
and positions, experts of a token and their groups, how many passes a step has. Made small: widths, depth, vocabulary,
sequence, batch, number of experts.
"""

import math
from dataclasses import replace

from megatron_lite.arithmetic.costs import model_costs
from megatron_lite.arithmetic.pipeline_schedule import check_microbatches
from megatron_lite.config import Config, ModelConfig

VOCABULARY = 1000
HEAD_WIDTH = 16
HIDDEN = 96
FEED_FORWARD = 160
EXPERT = 32
EXPERTS = 16
SEQUENCE = 64


def miniature(config: Config, max_parameters: int, max_tokens: int) -> Config:
    """The config itself when it is within both limits (tokens of a global batch), else its small likeness."""
    costs = model_costs(config.model, config.data.seq_length)
    parameters = costs.parameters
    tokens = config.training.global_batch_size * config.data.seq_length
    if parameters > max_parameters:
        config = replace(config, model=small_model(config))
        config = _with_layers(config)
    if parameters > max_parameters or tokens > max_tokens:
        config = _with_small_batch(config)
    return config


def describe_change(before: Config, after: Config) -> str:
    """'layers 80 -> 16, hidden 8,192 -> 96, ...'; empty when nothing was made smaller."""
    pairs = {
        "layers": (before.model.num_layers, after.model.num_layers),
        "hidden": (before.model.hidden_size, after.model.hidden_size),
        "feed-forward": (before.model.ffn_hidden_size, after.model.ffn_hidden_size),
        "experts": (before.model.num_experts or 0, after.model.num_experts or 0),
        "heads": (before.model.num_attention_heads, after.model.num_attention_heads),
        "vocabulary": (before.model.padded_vocab_size, after.model.padded_vocab_size),
        "sequence": (before.data.seq_length, after.data.seq_length),
        "global batch": (before.training.global_batch_size, after.training.global_batch_size),
    }
    return ", ".join(f"{name} {old:,} -> {new:,}" for name, (old, new) in pairs.items() if old != new)


def small_model(config: Config) -> ModelConfig:
    """The model with few narrow heads: as many key/value heads as tensor ranks, the same kind of grouping."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    groups = min(model.num_query_groups, tensor * min(2, model.num_query_groups // tensor))
    heads = groups * min(4, model.num_attention_heads // model.num_query_groups)
    vocabulary = min(model.vocab_size, VOCABULARY - 3)
    multiple = 64 * tensor // math.gcd(64, tensor)
    return replace(
        model,
        **_few_experts(config),
        hidden_size=min(model.hidden_size, HIDDEN),
        ffn_hidden_size=min(model.ffn_hidden_size, -(-FEED_FORWARD // tensor) * tensor),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=min(model.kv_channels, HEAD_WIDTH),
        vocab_size=vocabulary,
        padded_vocab_size=-(-vocabulary // multiple) * multiple,
    )


def _few_experts(config: Config) -> dict[str, int | None]:
    """Fields of a mixture with at least two experts a rank, and so many more than a token takes that choices differ."""
    model = config.model
    if not model.num_experts:
        return {}
    unit = math.lcm(config.parallel.expert_model_parallel_size, model.moe_router_num_groups or 1)
    most_of_group = -(-model.moe_router_topk // (model.moe_router_group_topk or 1))
    least = max(
        EXPERTS, 2 * model.moe_router_topk, 2 * unit, most_of_group * (model.moe_router_num_groups or 1)
    )
    shared = model.moe_shared_expert_intermediate_size
    return {
        "num_experts": min(model.num_experts, -(-least // unit) * unit),
        "moe_ffn_hidden_size": min(model.moe_ffn_hidden_size, EXPERT),
        "moe_shared_expert_intermediate_size": shared and min(shared, EXPERT),
    }


def _with_layers(config: Config) -> Config:
    """Two layers a stage, and the remainder that the real number leaves, unless the flags spell the stages out."""
    parallel, layers = config.parallel, config.model.num_layers
    if parallel.pipeline_model_parallel_layout or (
        parallel.decoder_first_pipeline_num_layers or parallel.decoder_last_pipeline_num_layers
    ):
        return config
    stages = parallel.num_stages
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if per_stage is not None:
        per_stage = min(per_stage, 2)
        layers = per_stage * stages
    else:
        layers = min(layers, 2 * stages + layers % stages)
    unit = parallel.recompute_num_layers
    return replace(
        config,
        model=replace(config.model, num_layers=layers, moe_layer_freq=_pattern(config.model, layers)),
        parallel=replace(
            parallel,
            num_layers_per_virtual_pipeline_stage=per_stage,
            recompute_num_layers=unit if unit is None else min(unit, layers),
        ),
    )


def _pattern(model: ModelConfig, layers: int) -> int | tuple[int, ...]:
    """Which of so many layers have experts: as the model's first ones; the last one has where none of these does."""
    if not model.num_experts:
        return model.moe_layer_freq
    first = model.moe_layer_freq[:layers]
    return first if any(first) else (*first[:-1], 1)


def _with_small_batch(config: Config) -> Config:
    """A short sequence, at most two samples a microbatch, and the fewest microbatches that fill the pipeline."""
    parallel, training = config.parallel, config.training
    unit = 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    seq_length = min(config.data.seq_length, -(-SEQUENCE // unit) * unit)
    samples = min(training.micro_batch_size, 2)
    count = training.global_batch_size // (training.micro_batch_size * parallel.data_parallel_size)
    limit = parallel.max_microbatches_per_step
    several = limit is not None and limit < count
    if several:
        limit = _fewest(config, limit)
        count = 2 * limit
    else:
        count = _fewest(config, count)
    window = config.model.window_size
    if window is not None and window[0] >= seq_length // 2:
        window = (seq_length // 4, window[1])
    learned = config.model.position_embedding_type == "learned_absolute"
    positions = seq_length if learned else config.model.max_position_embeddings
    return replace(
        config,
        model=replace(config.model, window_size=window, max_position_embeddings=positions),
        data=replace(config.data, seq_length=seq_length),
        parallel=replace(parallel, max_microbatches_per_step=limit),
        training=replace(
            training,
            micro_batch_size=samples,
            global_batch_size=count * samples * parallel.data_parallel_size,
        ),
    )


def _fewest(config: Config, count: int) -> int:
    """The fewest microbatches, of at least two a pipeline rank, that the schedule runs; count when it has fewer."""
    parallel = config.parallel
    size, chunks = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    for number in range(min(count, max(2, 2 * size)), count):
        if check_microbatches(parallel.pipeline_schedule, size, chunks, number) is None:
            return number
    return count
