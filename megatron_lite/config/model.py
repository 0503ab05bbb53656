"""The flags of the transformer, of its experts and of the numbers it computes with."""

from dataclasses import dataclass, fields

from megatron_lite.config.activations import ACTIVATIONS, Activation
from megatron_lite.config.declare import Numbers, Words, flag

# The widest head that flash attention computes.
FLASH_MAX_WIDTH = 256
# Flags of the model that may differ from a checkpoint's: they change how it trains, not what its weights mean.
TRAINING_ONLY = frozenset(
    {
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "attention_backend",
        "cross_entropy_loss_fusion",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_bias_update_rate",
        "moe_router_dtype",
        "moe_per_layer_logging",
    }
)
# --moe-router-load-balancing-type, and the loss of --moe-z-loss-coeff -> the name in Megatron's log.
LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "z_loss": "z_loss",
}


@dataclass(frozen=True)
class ExpertConfig:
    """Mixture of experts."""

    num_experts: int | None = flag(None, "experts E of a layer; 0 or none: a dense model", minimum=0)
    moe_router_topk: int = flag(2, "experts K that each token is sent to", minimum=1)
    moe_ffn_hidden_size: int | None = flag(None, "expert's MLP width; default --ffn-hidden-size", minimum=1)
    moe_layer_freq: int | Numbers = flag(
        1,
        "N: layers 0, N, 2N, ... have experts, the others are dense; or one 0 (dense) or 1 for each layer, "
        "e.g. '([0]+[1]*23)'",
        nargs="+",
        layer_pattern=True,
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        "width of the MLP that every token takes beside its experts: all shared experts together",
        minimum=1,
    )
    moe_shared_expert_gate: bool = flag(False, "multiply the shared expert by sigmoid(x w), w of width H")
    moe_router_score_function: str = flag(
        "softmax", "scores of the experts from the router's logits", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(
        False, "softmax over all experts before the choice; default: over the chosen ones after it"
    )
    moe_router_num_groups: int | None = flag(
        None,
        "equal groups of neighbouring experts, of which --moe-router-group-topk are chosen first",
        minimum=1,
    )
    moe_router_group_topk: int | None = flag(None, "groups that a token's experts may come from", minimum=1)
    moe_router_topk_scaling_factor: float | None = flag(None, "multiplies chosen experts' weights", above=0)
    moe_router_enable_expert_bias: bool = flag(
        False, "a bias for each expert, for the choice only, moved each step towards equal loads"
    )
    moe_router_bias_update_rate: float = flag(1e-3, "how far a step moves the expert bias", minimum=0)
    moe_router_dtype: str | None = flag(
        None,
        "number format of the router's logits; default that of the activations",
        choices=("fp32", "fp64"),
    )
    moe_router_load_balancing_type: Words = flag(
        ("aux_loss",),
        "aux_loss (over a microbatch), seq_aux_loss (over each sequence) or none; several with as many "
        "coefficients",
        nargs="+",
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), "factor of each balancing loss", nargs="+")
    moe_z_loss_coeff: float | None = flag(
        None, "factor of the mean squared logsumexp of the router's logits in the training loss", minimum=0
    )
    moe_per_layer_logging: bool = flag(False, "the balancing losses of each layer to the trackers")

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this global number is a mixture; the others are dense."""
        if not self.num_experts:
            return False
        pattern = self.moe_layer_freq
        return layer % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer])

    @property
    def balancing_coefficients(self) -> dict[str, float]:
        """{balancing loss: its coefficient}, those that are on: a coefficient above 0."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff)
        return {kind: coefficient for kind, coefficient in pairs if kind != "none" and coefficient}

    @property
    def router_losses(self) -> dict[str, float]:
        """{name in Megatron's log: coefficient} of the router's losses that are on."""
        on = self.balancing_coefficients | (
            {"z_loss": self.moe_z_loss_coeff} if self.moe_z_loss_coeff else {}
        )
        return {LOSS_NAMES[kind]: coefficient for kind, coefficient in on.items()}


EXPERT_FIELDS = frozenset(item.name for item in fields(ExpertConfig))


@dataclass(frozen=True)
class ModelConfig(ExpertConfig):
    """The transformer."""

    num_layers: int | None = flag(None, "transformer layers, total over all pipeline stages", minimum=1)
    hidden_size: int | None = flag(None, "model width H", minimum=1)
    ffn_hidden_size: int | None = flag(None, "MLP width; default 4H, --swiglu int(8H/3/64)*64", minimum=1)
    num_attention_heads: int | None = flag(None, "query heads", minimum=1)
    group_query_attention: bool = flag(False, "share each key/value head among several query heads")
    num_query_groups: int = flag(1, "key/value heads, read only with --group-query-attention", minimum=1)
    kv_channels: int | None = flag(None, "width of a head; default hidden size / heads", minimum=1)
    max_position_embeddings: int | None = flag(None, "position table rows; at least --seq-length", minimum=1)
    position_embedding_type: str = flag(
        "learned_absolute", "how positions enter the model", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: float = flag(10000.0, "base of the rotary frequencies", above=0)
    rotary_percent: float = flag(1.0, "part of a head's width that is rotated", above=0, maximum=1)
    rotary_interleaved: bool = flag(False, "rotate neighbouring pairs (GPT-J) instead of halves")
    use_rope_scaling: bool = flag(False, "Llama 3.1's stretch of the rotary frequencies")
    rope_scaling_factor: float = flag(8.0, "stretch of the long wavelengths", above=0)
    rope_scaling_low_freq_factor: float = flag(1.0, "ours: long waves begin at original / this", above=0)
    rope_scaling_high_freq_factor: float = flag(4.0, "ours: short ones end at original / this", above=0)
    rope_scaling_original_max_position_embeddings: int = flag(
        8192, "ours: context length before the stretch", minimum=1
    )
    normalization: str = flag("LayerNorm", "normalisation of the residual", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "added to the variance", aliases=("--layernorm-epsilon",), above=0)
    apply_layernorm_1p: bool = flag(False, "norm weights are stored as weight - 1")
    swiglu: bool = flag(False, "SiLU-gated MLP instead of GELU")
    squared_relu: bool = flag(False, "relu(x)^2 in the MLP instead of GELU")
    quick_geglu: bool = flag(False, "MLP gated by x sigmoid(1.702 x) instead of GELU")
    activation: str | None = flag(
        None,
        "ours: the MLP's activation by name; default gelu, or what --swiglu, --squared-relu or --quick-geglu says",
        choices=ACTIVATIONS,
    )
    activation_func_clamp_value: float | None = flag(
        None,
        "a gated activation's gate is at most this, its other input between minus this and this",
        above=0,
    )
    glu_linear_offset: float = flag(0.0, "added to what a gated activation's gate multiplies", minimum=None)
    disable_bias_linear: bool = flag(False, "no bias in linear layers")
    add_qkv_bias: bool = flag(False, "bias in the query, key and value projections even so")
    qk_layernorm: bool = flag(False, "normalise each head's query and key")
    qk_layernorm_across_heads: bool = flag(
        False, "ours: --qk-layernorm has one norm over all heads of the query, one over those of the key"
    )
    untie_embeddings_and_output_weights: bool = flag(False, "the output projection has a weight of its own")
    hidden_dropout: float = flag(0.1, "dropout probability on the residual branches", maximum=1)
    attention_dropout: float = flag(0.1, "dropout probability on attention weights", maximum=1)
    init_method_std: float = flag(
        0.02, "standard deviation of the initial weights; of output projections divided by sqrt(2 layers)"
    )
    window_size: tuple[int, int] | None = flag(
        None, "sliding window LEFT,RIGHT in tokens, for example 4096,0; -1 = no bound", nargs=2, minimum=-1
    )
    vocab_size: int | None = flag(None, "true vocabulary size; default: the tokenizer's", minimum=1)
    make_vocab_size_divisible_by: int = flag(128, "the vocabulary is padded to a multiple of this", minimum=1)
    padded_vocab_size: int | None = flag(None, "padded vocabulary, instead of the multiple", minimum=1)
    attention_backend: str = flag(
        "auto", "attention kernels to use", choices=("flash", "fused", "unfused", "local", "auto")
    )
    cross_entropy_loss_fusion: bool = flag(False, "compute the loss without keeping all logits in fp32")

    @property
    def activation_name(self) -> str:
        """Which of ACTIVATIONS the MLP has, by whatever flag said so."""
        by_flag = [name for name in ("swiglu", "squared_relu", "quick_geglu") if getattr(self, name)]
        return self.activation or (by_flag or ["gelu"])[0]

    @property
    def mlp_activation(self) -> Activation:
        """The MLP's activation: its function and its cost."""
        row = ACTIVATIONS[self.activation_name]
        return row.limited(self.activation_func_clamp_value, self.glu_linear_offset)

    @property
    def expert_activation(self) -> Activation:
        """The experts' activation: the MLP's, but gelu is the exact one, as Megatron fuses no gelu there."""
        return ACTIVATIONS["gelu_erf"] if self.activation_name == "gelu" else self.mlp_activation

    @property
    def qk_norm_widths(self) -> tuple[int, ...]:
        """Widths of --qk-layernorm's norms, (query, key); none without it."""
        heads = (
            (self.num_attention_heads, self.num_query_groups) if self.qk_layernorm_across_heads else (1, 1)
        )
        return tuple(number * self.kv_channels for number in heads) if self.qk_layernorm else ()

    def gpu_attention_kernel(self, half: bool, whole: bool, dropout: bool) -> str:
        """The kernel that core attention runs on a GPU, of the first kind that can:

        flash: no mask in memory, keys and values of grouped heads as they are; bf16 and fp16.
        flex: the same by FlexAttention's block masks, for fp32 with context parallelism or a window; no dropout.
        causal: what scaled_dot_product_attention has for a whole causal sequence; keys and values are repeated.
        masked: that with a dense mask [queries, keys].

        Args:
            half: computed in bf16 or fp16.
            whole: without context parallelism and window.
            dropout: attention weights are dropped.
        """
        fused = self.attention_backend not in ("unfused", "local")
        if fused and half and self.kv_channels <= FLASH_MAX_WIDTH:
            return "flash"
        if whole:
            return "causal"
        return "flex" if fused and not dropout else "masked"


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and loss scaling."""

    bf16: bool = flag(False, "bf16 compute, fp32 main weights and gradients")
    fp16: bool = flag(False, "fp16 compute with loss scaling, fp32 main weights")
    loss_scale: float | None = flag(None, "fixed loss scale; default: dynamic", above=0)
    initial_loss_scale: float = flag(float(2**32), "dynamic loss scale of the first step", above=0)
    min_loss_scale: float = flag(1.0, "lowest dynamic loss scale", above=0)
    loss_scale_window: float = flag(1000.0, "finite steps in a row before the loss scale doubles", minimum=1)
    hysteresis: int = flag(2, "non-finite steps before the dynamic loss scale halves", minimum=1)
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bf16 instead of fp32")
