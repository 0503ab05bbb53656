"""Bytes that each pipeline rank holds in a training step, from the flags alone. Imports no torch.

The engine as it is: FSDP2 over dp_shard x cp with fp32 shards, eager blocks without fused activations, gradients of a
step's microbatches added up unsharded and reduced once. Symbols: a bytes of an activation's element (2 with --bf16 or
--fp16, else 4), T = B S / cp tokens of a microbatch on a rank, t tensor ranks, s = t with sequence parallelism else 1,
n = dp_shard * cp shards, H hidden, q and kv widths of queries and keys, F feed-forward, V padded vocabulary.

Sources: states sharded as ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); activations tensor by
tensor as Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198) count them, for this model's operators.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from megatron_lite.config import Config, ModelConfig
from megatron_lite.mesh_sizes import mesh_sizes
from megatron_lite.model.costs import ModelCosts, block_matrix_parameters, model_costs
from megatron_lite.parallel.partition import StagePlan, placement_of, plan_from_config, stages_of_rank
from megatron_lite.parallel.schedule import Action, build_schedule, runnable_schedule

SPLIT_BACKWARD_SCHEDULES = ("interleaved-zero-bubble", "zbv", "dualpipev")
# Rows of logits at a time with --cross-entropy-loss-fusion, as model/loss.py has it (which imports torch).
LOSS_CHUNK_TOKENS = 1024
# torch's pipeline runtime keeps the weights of at most so many of a rank's stages gathered.
_MOST_ACTIVE_STAGES = 3


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank by purpose; `host` lies in the node's memory (--fsdp-cpu-offload)."""

    rank: int
    parts: dict[str, float]
    host: float = 0.0
    total: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.parts.values()))


def activation_width(config: Config) -> int:
    """a: bytes of an element of activations and of gathered weights."""
    return 2 if config.precision.bf16 or config.precision.fp16 else 4


def tokens_per_microbatch(config: Config) -> int:
    """T = B S / cp."""
    return config.training.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size


def shards(config: Config) -> int:
    """n: ranks that one copy of the parameters is cut over; context ranks are data-parallel ranks for parameters."""
    sizes = mesh_sizes(config)
    return sizes["dp_shard"] * sizes["cp"]


def microbatches_of(config: Config) -> tuple[int, int]:
    """(pipeline passes of a step, microbatches of a pass): equal passes of at most --max-microbatches-per-step."""
    samples = config.training.micro_batch_size * config.parallel.data_parallel_size
    count = config.training.global_batch_size // samples
    limit = min(config.parallel.max_microbatches_per_step or count, count)
    size = max(size for size in range(1, limit + 1) if count % size == 0)
    return count // size, size


@lru_cache(maxsize=64)
def costs_of(model: ModelConfig, seq_length: int) -> ModelCosts:
    """`model_costs`, remembered: a search asks for them a hundred thousand times."""
    return model_costs(model, seq_length)


def block_parameters(config: Config) -> float:
    """Parameters of one block on a tensor rank: matrices and column biases / t, norms and row biases whole."""
    return _block_parameters(config.model, config.parallel.tensor_model_parallel_size)


@lru_cache(maxsize=64)
def _block_parameters(model: ModelConfig, tensor_size: int) -> float:
    whole = model_costs(model, 1).block.parameters
    split = block_matrix_parameters(model)
    if model.add_qkv_bias or not model.disable_bias_linear:
        split += (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    if not model.disable_bias_linear:
        split += (2 if model.swiglu else 1) * model.ffn_hidden_size
    return whole - split + split / tensor_size


def stage_local_parameters(config: Config, plan: StagePlan) -> float:
    """Parameters of a stage on a tensor rank, before FSDP cuts them: vocabulary rows / t, the rest as blocks are."""
    model, t = config.model, config.parallel.tensor_model_parallel_size
    costs = costs_of(model, config.data.seq_length)
    rows = model.padded_vocab_size * model.hidden_size
    count = len(plan.layers) * block_parameters(config)
    if plan.has_embedding:
        count += costs.embedding.parameters - rows + rows / t
    if plan.has_lm_head:
        own_rows = not costs.shared_parameters or not plan.has_embedding
        norm = costs.head.parameters - (0 if costs.shared_parameters else rows)
        count += norm + (rows / t if own_rows else 0)
    return count


def optimizer_bytes(config: Config, plan: StagePlan) -> float:
    """Optimizer state of a stage on a rank: 8 bytes a parameter for Adam's two fp32 averages, 4 for a momentum.

    Muon keeps a momentum for the blocks' matrices and Adam's averages for the rest.
    """
    name, count = config.optimizer.optimizer, stage_local_parameters(config, plan)
    matrices = len(plan.layers) * block_matrix_parameters(config.model)
    matrices /= config.parallel.tensor_model_parallel_size
    bytes_of_state = {"adam": 8 * count, "sgd": 4 * count, "muon": 8 * count - 4 * matrices}[name]
    return bytes_of_state / shards(config)


def block_activations(config: Config, recompute: str | None) -> float:
    """Bytes that one block keeps for the backward of one microbatch.

    Nothing recomputed, per token and in elements (times a):
        2 H/s            inputs of the two norms (the residual stream)
        2 H              inputs of the attention and MLP projections, whole also with sequence parallelism
        4 q/t            what core attention saves: queries, its output, keys and values repeated for every head
        2 F/t            GELU or squared ReLU: its input and output; 4 F/t for SwiGLU: gate, up, silu(gate), product
    plus, per token, fp32 statistics (4 bytes a norm, 8 for LayerNorm, 4 N/t for the softmax), 1 byte H/s for each of
    two dropout masks when hidden dropout is on, and q + kv over t for query/key norms. With t = 1 and GELU this is
    the 34 s b h of Korthikanti et al. less the masks. Context parallelism keeps keys and values of the whole
    sequence, seen twice, and the dense mask of its two query chunks: a (S / 2cp)^2 (2cp + 1).

    selective (core attention): keys and values are kept as they are, not repeated, and no softmax statistics.
    full: the block's input alone, a T H/s.
    """
    model, parallel = config.model, config.parallel
    a, tokens, hidden = activation_width(config), tokens_per_microbatch(config), model.hidden_size
    t = parallel.tensor_model_parallel_size
    s = t if parallel.sequence_parallel else 1
    if recompute == "full":
        return a * tokens * hidden / s
    modules = set(parallel.recompute_modules) if recompute == "selective" else set()
    query, key_value = _widths(config)
    elements = 2 * hidden / s + 2 * hidden
    if "mlp" not in modules:
        elements += (4 if model.swiglu else 2) * model.ffn_hidden_size / t
    if model.qk_layernorm:
        elements += (query + key_value) / t
    statistics = 2.0 * (8 if model.normalization == "LayerNorm" else 4) * ("layernorm" not in modules)
    if model.hidden_dropout:
        statistics += 2 * hidden / s
    extra = 0.0
    if "core_attn" in modules:
        elements += 2 * (query + key_value) / t
    else:
        statistics += 4 * model.num_attention_heads / t
        keys, extra = _keys_and_mask(config, query, key_value)
        elements += (2 * query + keys) / t
    return tokens * (a * elements + statistics) + extra


def _keys_and_mask(config: Config, query: int, key_value: int) -> tuple[float, float]:
    """Elements of keys and values that core attention keeps per own token (of all t), and bytes of its mask."""
    cp, length = config.parallel.context_parallel_size, config.data.seq_length
    if cp == 1:
        return 2 * query, 0.0
    seen = (
        cp + 0.5 if query != key_value else cp
    )  # repeated for each of two query chunks, or views of one gathering
    mask = activation_width(config) * (length / (2 * cp)) ** 2 * (2 * cp + 1)
    return 2 * query * seen, mask


def _widths(config: Config) -> tuple[int, int]:
    model = config.model
    return model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels


def stage_activations(config: Config, plan: StagePlan) -> float:
    """Bytes that a stage keeps for the backward of one microbatch: its blocks, its output, its head.

    The output is the hidden state that the pipeline holds until backward (a T H/s), on the last stage the final norm's
    input; there come the head's input (a T H) and what the loss saves of the logits. The input of a stage that is not
    the first lies in a receive buffer and is not counted here.
    """
    a, tokens = activation_width(config), tokens_per_microbatch(config)
    parallel, hidden = config.parallel, config.model.hidden_size
    s = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    granularity, layers = parallel.recompute_granularity, len(plan.layers)
    if granularity == "full" and parallel.recompute_method == "block":
        made_again = min(layers, parallel.recompute_num_layers)
        size = made_again * block_activations(config, "full")
        size += (layers - made_again) * block_activations(config, None)
    elif granularity == "full":
        size = -(-layers // parallel.recompute_num_layers) * block_activations(config, "full")
    else:
        size = layers * block_activations(config, granularity)
    if plan.stage == 0:
        size += a * tokens * hidden / s  # other stages' input lies in a receive buffer
    if plan.has_lm_head:
        size += a * tokens * hidden + _logits(config)[0]
    return size


def _logits(config: Config) -> tuple[float, float]:
    """(bytes kept until the loss's backward, most bytes alive beside them in it) of the logits [T, V/t].

    One rank: log-probabilities in fp32 (4) are kept; beside them their gradient and the logits', both fp32. Several
    tensor ranks: probabilities in a are kept, with a and twice 4 beside them. With --cross-entropy-loss-fusion 1,024
    rows at a time, nothing kept.
    """
    a, t = activation_width(config), config.parallel.tensor_model_parallel_size
    rows, width = tokens_per_microbatch(config), config.model.padded_vocab_size / t
    kept, beside = (4, 8) if t == 1 else (a, 8 + a)
    if config.model.cross_entropy_loss_fusion and rows > LOSS_CHUNK_TOKENS:
        return 0.0, LOSS_CHUNK_TOKENS * width * (kept + beside)
    return kept * rows * width, beside * rows * width


@dataclass(frozen=True)
class _Split:
    """What a split into stages depends on, so that layouts that differ elsewhere share it."""

    key: tuple[object, ...]
    config: Config = field(compare=False)


def stages_of(config: Config) -> list[StagePlan]:
    """`plan_from_config`, remembered."""
    parallel = config.parallel
    key = (
        config.model,
        config.data.seq_length,
        parallel.pipeline_model_parallel_size,
        parallel.num_virtual_stages_per_pipeline_rank,
        placement_of(parallel.pipeline_schedule),
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
        parallel.account_for_embedding_in_pipeline_split,
        parallel.account_for_loss_in_pipeline_split,
        parallel.num_layers_per_virtual_pipeline_stage,
        parallel.pipeline_model_parallel_layout,
    )
    return _stages_of(_Split(key, config))


@lru_cache(maxsize=1024)
def _stages_of(split: _Split) -> list[StagePlan]:
    return plan_from_config(split.config)


def rank_memory(config: Config, ranks: Sequence[int] | None = None) -> list[RankMemory]:
    """What each pipeline rank (or each of `ranks`) holds at the worst moment of a step.

    parameters 4 P/n, optimizer state (see optimizer_bytes), unsharded gradients, receive buffers, and of four moments
    the one that needs most:
      a stage's backward begins: activations of the microbatches in flight, the workspace of a block's backward, the
        gathered weights (where they are freed after forward: of a block and the largest unit only);
      it ends: gathered weights of all its blocks, one microbatch's activations less;
      the loss, on the last stage: as when a backward begins, with the head gathered and the logits' workspace;
      when gradients are reduced: gathered weights, the largest unit once more in the reduction's format, gradient
        shards 4 P/n.
    The vocabulary has to be known.
    """
    plans = stages_of(config)
    ranks = range(config.parallel.pipeline_model_parallel_size) if ranks is None else ranks
    return [_memory_of(config, rank, stages_of_rank(plans, rank), len(plans)) for rank in ranks]


def _memory_of(config: Config, rank: int, plans: list[StagePlan], num_stages: int) -> RankMemory:
    count = shards(config)
    local = [stage_local_parameters(config, plan) for plan in plans]
    parameters = 4 * sum(local) / count
    state = sum(optimizer_bytes(config, plan) for plan in plans)
    in_flight = activations_in_flight(config, rank, plans)
    gathered, unsharded = _unsharded(config, plans, local)
    kept = {
        "parameters": parameters,
        "optimizer state": state,
        "unsharded gradients": unsharded,
        "receive buffers": _receive_buffers(config, plans, num_stages),
    }
    reduction = _reduced_width(config) * max(local_unit(config, plan) for plan in plans)
    freed = min(stage_activations(config, plan) for plan in plans) if reshards(config) else 0.0
    at_start = min(gathered, _two_units(config, plans)) if reshards(config) else gathered
    moments = [
        {"gathered weights": at_start, "activations": in_flight, "workspace": _workspace(config)},
        {"gathered weights": gathered, "activations": in_flight - freed, "workspace": _workspace(config)},
        {"gathered weights": gathered, "gradient shards": parameters, "workspace": reduction},
    ]
    if any(plan.has_lm_head for plan in plans):
        unit = activation_width(config) * max(local_unit(config, plan) for plan in plans)
        at_loss = min(gathered, unit) if reshards(config) else gathered
        loss = _logits(config)[1]
        moments.append({"gathered weights": at_loss, "activations": in_flight, "workspace": loss})
    parts = kept | max(moments, key=lambda moment: sum(moment.values()))
    host = 0.0
    if config.parallel.fsdp_cpu_offload:
        host = parts.pop("parameters") + parts.pop("optimizer state") + parameters
        if "gradient shards" in parts:
            parts["gradient shards"] = 0.0
    return RankMemory(rank, parts, host)


def local_unit(config: Config, plan: StagePlan) -> float:
    """Parameters of the largest FSDP unit of a stage on a tensor rank: a block, the embedding or the head."""
    rows = config.model.padded_vocab_size * config.model.hidden_size
    rows /= config.parallel.tensor_model_parallel_size
    return max(
        block_parameters(config) if plan.layers else 0, rows * (plan.has_embedding or plan.has_lm_head)
    )


def _reduced_width(config: Config) -> int:
    """Bytes of a gradient's element when it is added up and reduced: fp32, or bf16 with --grad-reduce-in-bf16."""
    return 2 if config.precision.grad_reduce_in_bf16 else 4


def _unsharded(config: Config, plans: list[StagePlan], local: Sequence[float]) -> tuple[float, float]:
    """Bytes of gathered weights and of unsharded gradients.

    Several microbatches: torch's pipeline frees weights and reduces gradients after the last backward only, so a
    rank's stages lie gathered (a P, at most three stages) and their gradients are added up whole (fp32: 4 P; in a by
    the schedules that split the backward). One microbatch: ZeRO-3's block by block, two blocks and the head gathered
    and one gradient.
    """
    a = activation_width(config)
    if microbatches_of(config) == (1, 1):
        units = max(local_unit(config, plan) for plan in plans)
        keeps = not reshards(config)
        blocks = (1 + max(1, config.parallel.fsdp_prefetch_depth)) * block_parameters(config)
        return a * (sum(local) if keeps else min(sum(local), blocks + units)), a * units
    split = config.parallel.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES
    active = sum(local) if split or len(local) == 1 else sum(sorted(local)[-_MOST_ACTIVE_STAGES:])
    return a * active, (a if split else _reduced_width(config)) * sum(local)


def reshards(config: Config) -> bool:
    """Whether gathered weights are freed after the forward pass (ZeRO-3), as parallel/fsdp.py decides."""
    parallel = config.parallel
    return (
        parallel.data_parallel_sharding_strategy == "optim_grads_params"
        and parallel.pipeline_schedule not in SPLIT_BACKWARD_SCHEDULES
        and parallel.reshard_after_forward != "never"
    )


def _two_units(config: Config, plans: list[StagePlan]) -> float:
    """Bytes of the gathered weights of a block and of the largest unit."""
    return activation_width(config) * (block_parameters(config) + max(local_unit(config, p) for p in plans))


def _workspace(config: Config) -> float:
    """Bytes of a block's backward beside what was kept: three gradients of its widest tensor, what is recomputed."""
    parallel, again = config.parallel, 0.0
    if parallel.recompute_granularity == "full":
        unit = parallel.recompute_num_layers if parallel.recompute_method == "uniform" else 1
        again = unit * (block_activations(config, None) - block_activations(config, "full") / unit)
    elif parallel.recompute_granularity == "selective":
        again = max(0.0, block_activations(config, None) - block_activations(config, "selective"))
    a, tokens, t = (
        activation_width(config),
        tokens_per_microbatch(config),
        parallel.tensor_model_parallel_size,
    )
    gradients = 3 * a * tokens * max(config.model.hidden_size, config.model.ffn_hidden_size / t)
    return again + gradients


def _receive_buffers(config: Config, plans: list[StagePlan], num_stages: int) -> float:
    """One buffer a T H/s per microbatch of a pass, for each stage's input and for its output's gradient.

    A stage's input buffer is what its first block keeps, so those in flight are not counted there again.
    """
    parallel = config.parallel
    s = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    hidden = activation_width(config) * tokens_per_microbatch(config) * config.model.hidden_size / s
    sides = sum((plan.stage > 0) + (plan.stage < num_stages - 1) for plan in plans)
    return sides * microbatches_of(config)[1] * hidden


def activations_in_flight(config: Config, rank: int, plans: list[StagePlan]) -> float:
    """Most bytes of activations that a rank holds at once: schedule.peak_in_flight weighed by stage_activations."""
    parallel = config.parallel
    _, count = microbatches_of(config)
    size = parallel.pipeline_model_parallel_size
    name = runnable_schedule(parallel.pipeline_schedule, size, count)
    weights = {plan.stage: stage_activations(config, plan) for plan in plans}
    counts = live_counts(name, size, _enough(name, size, count), len(plans), rank)
    return max(sum(n * weights[plan.stage] for n, plan in zip(live, plans)) for live in counts)


def _enough(name: str, size: int, microbatches: int) -> int:
    """Microbatches after which a schedule holds no more than before: four rounds; gpipe holds all."""
    return min(microbatches, 4 * size) if name != "gpipe" and microbatches % size == 0 else microbatches


@lru_cache(maxsize=4096)
def live_counts(
    name: str, size: int, microbatches: int, chunks: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    """The greatest numbers of microbatches in flight of a rank's stages, in chunk order; no tuple is below another."""
    actions: list[Action] = _schedule(name, size, microbatches, chunks)[rank]
    stages = sorted({action.stage for action in actions})
    live = dict.fromkeys(stages, 0)
    seen = set()
    for action in actions:
        if action.kind == "F":
            live[action.stage] += 1
            seen.add(tuple(live.values()))
        elif action.kind in "BW":
            live[action.stage] -= 1
    return tuple(
        one for one in seen if not any(one != o and all(x <= y for x, y in zip(one, o)) for o in seen)
    )


@lru_cache(maxsize=16)
def _schedule(name: str, size: int, microbatches: int, chunks: int) -> list[list[Action]]:
    return build_schedule(name, size, microbatches, chunks)
