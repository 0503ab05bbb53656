"""Bytes of activations, tensor by tensor: what a block and a stage keep for backward, and what backward works in.

Imports no torch. Symbols as in memory.py; in a mixture E experts of width F, K of a token, R rows (a token once for
each of its experts). Source: Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), for this model's operators.
"""

from megatron_lite.arithmetic.partition import StagePlan
from megatron_lite.arithmetic.pipeline_schedule import placement_of, rank_of_stage
from megatron_lite.config import Config

# --moe-router-dtype -> bytes of a logit; default as the activations.
ROUTER_WIDTHS = {"fp32": 4, "fp64": 8}
# Rows of logits at a time with --cross-entropy-loss-fusion, as model/loss.py has it (which imports torch).
LOSS_CHUNK_TOKENS = 1024


def activation_width(config: Config) -> int:
    """a: bytes of an element of activations and of gathered weights."""
    return 2 if config.precision.bf16 or config.precision.fp16 else 4


def tokens_per_microbatch(config: Config) -> int:
    """T = B S / cp."""
    return config.training.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size


def sequence_ranks(config: Config) -> int:
    """s: tensor ranks that share the residual stream, t with sequence parallelism, else 1."""
    return config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1


def hidden_bytes(config: Config) -> float:
    """a T H / s: the hidden state of one microbatch on a rank."""
    elements = tokens_per_microbatch(config) * config.model.hidden_size
    return activation_width(config) * elements / sequence_ranks(config)


def expert_rows(config: Config) -> tuple[float, float]:
    """(rows of its own tokens, rows that its experts compute) on a rank, K T / s each when the routing is even.

    Tensor ranks route their own positions each. Where experts are spread over ranks the fullest rank computes
    --imbalance times as many, but never more than all ranks of its group can send.
    """
    model, size = config.model, config.parallel.expert_model_parallel_size
    tokens = tokens_per_microbatch(config) / sequence_ranks(config)
    rows = model.moe_router_topk * tokens
    if size == 1:
        return rows, rows
    most = size * tokens * min(model.moe_router_topk, model.num_experts // size)
    return rows, min(rows * config.command.imbalance, most)


def block_activations(config: Config, recompute: str | None, mixture: bool = False) -> float:
    """Bytes that one block, dense or with a mixture of experts, keeps for the backward of one microbatch.

    Nothing recomputed, per token and in elements (times a):
        2 H/s            inputs of the two norms (the residual stream)
        H + H            inputs of the attention and MLP projections, whole also with sequence parallelism
        2 (q + kv)/t     what core attention saves: queries, its output, keys, values; 4 q/t where its kernel takes no
                         groups (fp32, unfused) and keys and values are repeated for every head
        2 F/t            GELU or squared ReLU: its input and output; 4 F/t for SwiGLU: gate, up, silu(gate), product
    plus, per token, fp32 statistics (4 bytes a norm, 8 for LayerNorm, 4 N/t for the softmax), 1 byte H/s for each of
    two dropout masks when hidden dropout is on, and q + kv over t for query/key norms. With t = 1 and GELU this is
    the 34 s b h of Korthikanti et al. less the masks. Context parallelism saves keys and values of the whole
    sequence. A dense mask is there only with a window or context parallelism where neither flash attention nor
    FlexAttention runs: a S^2, or a (S / 2cp)^2 (2cp + 1) for two query chunks.

    In a mixture, in place of the MLP's, H/s for its input and what `mixture_activations` says.

    selective (core attention): its output and statistics are not saved; keys and values only of own tokens.
    full: the block's input alone, a T H/s.
    """
    if recompute == "full":
        return hidden_bytes(config)
    model, parallel, hidden = config.model, config.parallel, config.model.hidden_size
    t, s = parallel.tensor_model_parallel_size, sequence_ranks(config)
    modules = parallel.recomputed_modules if recompute == "selective" else ()
    query, key_value = _widths(config)
    elements, extra = 3 * hidden / s + hidden if mixture else 2 * hidden / s + 2 * hidden, 0.0
    if mixture and "moe" not in modules:
        extra = mixture_activations(config)
    elif not mixture and "mlp" not in modules:
        elements += model.mlp_activation.num_saved * model.ffn_hidden_size / t
    if model.qk_layernorm:
        elements += (query + key_value) / t
    statistics = 2.0 * (8 if model.normalization == "LayerNorm" else 4) * ("layernorm" not in modules)
    if model.hidden_dropout:
        statistics += 2 * hidden / s
    if "core_attn" in modules:
        elements += 2 * (query + key_value) / t
    else:
        statistics += 4 * model.num_attention_heads / t
        keys, mask = _keys_and_mask(config, query, key_value)
        elements += (2 * query + keys) / t
        extra += mask
    return tokens_per_microbatch(config) * (activation_width(config) * elements + statistics) + extra


def mixture_activations(config: Config) -> float:
    """Bytes that a mixture keeps beside its input, for the backward of one microbatch.

    A row of an expert, in elements (times a):
        H                its token, as the input of the first projections (one more where linears have biases)
        3 F              GELU or squared ReLU: input, output, times the weight; 5 F for SwiGLU: gate, up, silu(gate)
                         and product before it
        1                its weight
    and 16 bytes for where it came from, 16 more where it is sent to another rank. Of a token 12 K bytes for its choice
    and 4 E of scores, as much again for each kind of loss; the shared expert what an MLP of its width keeps, with a
    gate H more. In another format than the activations (--moe-router-dtype) the router keeps its own copies of its
    input and of its weight.
    """
    model, a, hidden = config.model, activation_width(config), config.model.hidden_size
    tokens = tokens_per_microbatch(config) / sequence_ranks(config)
    sent, rows = expert_rows(config)
    activation, biases = model.expert_activation, not model.disable_bias_linear
    row = hidden * (1 + biases) + (activation.num_saved + 1) * model.moe_ffn_hidden_size + 1
    size = rows * (a * row + 16) + (16 * sent if config.parallel.expert_model_parallel_size > 1 else 0.0)
    losses = bool(model.balancing_coefficients) + bool(model.moe_z_loss_coeff)
    size += tokens * (12 * model.moe_router_topk + 4 * model.num_experts * (1 + losses))
    shared = model.moe_shared_expert_intermediate_size
    if shared:
        size += a * tokens * (activation.num_saved * shared + hidden * model.moe_shared_expert_gate)
    router = ROUTER_WIDTHS.get(model.moe_router_dtype, a)
    if router != a:
        size += router * hidden * (tokens + model.num_experts) - (0 if shared else a * tokens * hidden)
    return size


def attention_kernel(config: Config) -> str:
    """The kernel that core attention runs on this config's GPUs, as `gpu_attention_kernel` names it."""
    model, length = config.model, config.data.seq_length
    windowed = model.window_size is not None and 0 <= model.window_size[0] < length - 1
    return model.gpu_attention_kernel(
        half=config.precision.bf16 or config.precision.fp16,
        whole=not windowed and config.parallel.context_parallel_size == 1,
        dropout=model.attention_dropout > 0,
    )


def _keys_and_mask(config: Config, query: int, key_value: int) -> tuple[float, float]:
    """Elements of keys and values that core attention saves per own token (of all t), and bytes of its mask."""
    cp, length = config.parallel.context_parallel_size, config.data.seq_length
    kernel = attention_kernel(config)
    if kernel in ("flash", "flex"):
        return 2 * key_value * cp, 0.0  # views of one all-gather
    # Repeated for each of two query chunks, or views of one all-gather.
    keys = 2 * query * (cp if cp == 1 or query == key_value else cp + 0.5)
    a = activation_width(config)
    if kernel == "causal":
        return keys, 0.0
    return keys, a * (length**2 if cp == 1 else (length / (2 * cp)) ** 2 * (2 * cp + 1))


def _widths(config: Config) -> tuple[int, int]:
    model = config.model
    return model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels


def stage_activations(config: Config, plan: StagePlan) -> float:
    """Bytes that a stage keeps for the backward of one microbatch: its blocks, its output, its head.

    The output is the hidden state that the pipeline holds until backward (a T H/s), on the last stage the final norm's
    input; there come the head's input (a T H) and what the loss saves of the logits. What it was sent is its input.
    """
    parallel, kinds = config.parallel, [config.model.has_experts(number) for number in plan.layers]
    granularity, units, rest = parallel.recompute_granularity, 0, kinds
    if granularity == "full" and parallel.recompute_method == "block":
        units = min(len(kinds), parallel.recompute_num_layers)
        granularity, rest = None, kinds[units:]
    elif granularity == "full":
        units, rest = -(-len(kinds) // parallel.recompute_num_layers), []
    size = units * block_activations(config, "full")
    size += sum(rest.count(kind) * block_activations(config, granularity, kind) for kind in set(rest))
    ranks, placement = parallel.pipeline_model_parallel_size, placement_of(parallel.pipeline_schedule)
    if plan.stage == 0 or rank_of_stage(plan.stage - 1, ranks, placement) != plan.rank:
        size += hidden_bytes(config)  # a stage on the same rank holds it as its output
    if plan.has_lm_head:
        size += hidden_bytes(config) * sequence_ranks(config) + logits_bytes(config)[0]
    return size


def logits_bytes(config: Config) -> tuple[float, float]:
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


def waiting_bytes(config: Config, plan: StagePlan) -> float:
    """Bytes of one microbatch of a stage between its input's gradient and its weights' (split backward).

    What the stage keeps stays, but for what the loss saved of the logits; to it come the gradients of the outputs of
    all linears and norms, in elements per token of a block:
        2 H + 2 H/s + (q + 2 kv + m F)/t, m = 2 for SwiGLU (gate and up), else 1
    of a mixture, instead of H + m F/t: H + m F a row, E and the shared expert's H + m F a token;
    and on the last stage those of the logits, V/t, and of the final norm, H/s.
    """
    model, t, s = config.model, config.parallel.tensor_model_parallel_size, sequence_ranks(config)
    query, key_value = _widths(config)
    inputs, hidden = model.mlp_activation.num_inputs, model.hidden_size
    common = hidden + 2 * hidden / s + (query + 2 * key_value) / t
    kinds = {False: hidden + inputs * model.ffn_hidden_size / t}
    if model.num_experts:
        shared = model.moe_shared_expert_intermediate_size
        row = hidden + inputs * model.moe_ffn_hidden_size
        token = model.num_experts + (hidden + inputs * shared if shared else 0)
        kinds[True] = token / s + row * expert_rows(config)[1] / tokens_per_microbatch(config)
    elements = sum(common + kinds[model.has_experts(number)] for number in plan.layers)
    saved = stage_activations(config, plan)
    if plan.has_lm_head:
        elements += model.padded_vocab_size / t + hidden / s
        saved -= logits_bytes(config)[0]
    return saved + activation_width(config) * tokens_per_microbatch(config) * elements


def workspace_bytes(config: Config, plan: StagePlan) -> float:
    """Bytes of a block's backward beside what was kept: three gradients of its widest tensor, what is recomputed."""
    kinds = {config.model.has_experts(number) for number in plan.layers} or {False}
    return max(_block_workspace(config, kind) for kind in kinds)


def _block_workspace(config: Config, mixture: bool) -> float:
    parallel, model, again = config.parallel, config.model, 0.0
    whole = block_activations(config, None, mixture)
    if parallel.recompute_granularity == "full":
        unit = parallel.recompute_num_layers if parallel.recompute_method == "uniform" else 1
        again = unit * (whole - block_activations(config, "full") / unit)
    elif parallel.recompute_granularity == "selective":
        again = max(0.0, whole - block_activations(config, "selective", mixture))
    tokens, hidden = tokens_per_microbatch(config), model.hidden_size
    widest = tokens * max(hidden, model.ffn_hidden_size / parallel.tensor_model_parallel_size)
    if mixture:
        widest = max(tokens * hidden, expert_rows(config)[1] * max(hidden, model.moe_ffn_hidden_size))
    return again + 3 * activation_width(config) * widest
