"""Parameters and floating-point operations of a GPT model, component by component, from its configuration alone.

The one place where the model's size is written as a formula: the pipeline split balances by it, arithmetic/flops.py
adds it up for the throughput in the log, tools/plan.py predicts memory and time from it. Imports no torch.

Symbols: H hidden, q = heads * head width, kv = key/value heads * head width, F feed-forward width (of one expert where
there are some), V padded vocabulary, S sequence length, E experts of which a token takes K; m = 3 matrices in a SwiGLU
MLP, else 2.
"""

from dataclasses import dataclass
from functools import lru_cache

from megatron_lite.config.model import ModelConfig

# F.grouped_mm, which computes the experts, takes rows of a multiple of so many bytes.
GROUPED_MM_BYTES = 16


@dataclass(frozen=True)
class ComponentCost:
    """What one component stores and computes.

    `parameters` counts scalars; `flops` counts forward and backward of one sequence of S tokens (backward is twice
    the forward; recomputed work is not counted). Of the parameters, `split` are those that tensor ranks share, where
    the others lie whole on each of them; `mixture` those of router, experts and shared expert, which tensor ranks share
    as data-parallel ranks do; of these `experts` those that tokens are routed to, and `idle` what one token does not
    take.
    """

    parameters: int
    flops: int
    split: int = 0
    mixture: int = 0
    experts: int = 0
    idle: int = 0

    @property
    def active(self) -> int:
        """Parameters that one token takes: router, K experts, shared expert and all else."""
        return self.parameters - self.idle

    def on_tensor_rank(self, tensor_size: int) -> float:
        """Parameters of one of so many tensor ranks."""
        return self.parameters - self.split + self.split / tensor_size


@dataclass(frozen=True)
class ModelCosts:
    """Costs of the embedding, of each transformer layer and of the head (final norm and output projection).

    `layers` are by global layer number. `shared_parameters` is the size of the matrix that embedding and head share
    when they are tied, else 0. It is counted in `embedding`; a last stage that does not hold the embedding keeps a
    copy of it.
    """

    embedding: ComponentCost
    layers: tuple[ComponentCost, ...]
    head: ComponentCost
    shared_parameters: int = 0

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied matrix counted once."""
        return sum(part.parameters for part in (self.embedding, *self.layers, self.head))

    @property
    def active(self) -> int:
        """Of them, those that one token takes; embedding and head count whole, as in published figures with both."""
        return sum(part.active for part in (self.embedding, *self.layers, self.head))

    @property
    def flops(self) -> int:
        """Forward and backward FLOPs of the whole model for one sequence."""
        return sum(part.flops for part in (self.embedding, *self.layers, self.head))


@lru_cache(maxsize=64)
def model_costs(model: ModelConfig, seq_length: int) -> ModelCosts:
    """Costs of each component of `model` for sequences of `seq_length` tokens.

    FLOPs follow Megatron's count: 6 per weight and token in the matrix products, 6 S^2 q per layer for causal
    attention (scores and values, the masked half not counted); of a mixture K experts and the shared one. Embedding
    look-up, norms, activations, the router and the shared expert's gate (6 S H (E + 1)) are free.

    The padded vocabulary has to be known (`model.padded_vocab_size`).
    """
    assert model.padded_vocab_size is not None, "the vocabulary has to be known before costs can be counted"
    hidden, vocabulary = model.hidden_size, model.padded_vocab_size
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    tied = not model.untie_embeddings_and_output_weights
    mixtures = [model.has_experts(number) for number in range(model.num_layers)]
    kinds = {mixture: _layer_cost(model, seq_length, mixture) for mixture in set(mixtures)}
    return ModelCosts(
        embedding=ComponentCost((vocabulary + positions) * hidden, flops=0, split=vocabulary * hidden),
        layers=tuple(kinds[mixture] for mixture in mixtures),
        head=ComponentCost(
            parameters=_norm_parameters(model, hidden) + (0 if tied else vocabulary * hidden),
            flops=6 * seq_length * hidden * vocabulary,
            split=0 if tied else vocabulary * hidden,
        ),
        shared_parameters=vocabulary * hidden if tied else 0,
    )


def _layer_cost(model: ModelConfig, seq_length: int, mixture: bool) -> ComponentCost:
    query, key_value = (
        model.num_attention_heads * model.kv_channels,
        model.num_query_groups * model.kv_channels,
    )
    biased, hidden = not model.disable_bias_linear, model.hidden_size
    split = block_matrix_parameters(model, mixture) - (
        mlp_matrix_parameters(model, mixture) if mixture else 0
    )
    if biased or model.add_qkv_bias:
        split += query + 2 * key_value
    whole = 2 * _norm_parameters(model, hidden) + biased * hidden
    whole += sum(_norm_parameters(model, width) for width in model.qk_norm_widths)
    if biased and not mixture:
        split, whole = split + model.mlp_activation.num_inputs * model.ffn_hidden_size, whole + hidden
    flops = 6 * seq_length * block_matrix_parameters(model, mixture, active=True) + 6 * seq_length**2 * query
    if not mixture:
        return ComponentCost(split + whole, flops, split)
    one, number = expert_parameters(model), model.num_experts
    router = number * (hidden + biased) + hidden * model.moe_shared_expert_gate
    shared = mlp_matrix_parameters(model, mixture) - number * expert_matrix_parameters(model)
    return ComponentCost(
        parameters=split + whole + router + shared + number * one,
        flops=flops,
        split=split,
        mixture=router + shared + number * one,
        experts=number * one,
        idle=(number - model.moe_router_topk) * one,
    )


def block_matrix_parameters(model: ModelConfig, mixture: bool = False, active: bool = False) -> int:
    """Weights of the matrix products of one layer: attention's four projections and the MLP's or the experts'.

    Args:
        mixture: of a layer with experts; its router and the shared expert's gate are not among them.
        active: of the experts only the K that a token takes.
    """
    query = model.num_attention_heads * model.kv_channels
    key_value = model.num_query_groups * model.kv_channels
    attention = model.hidden_size * (query + 2 * key_value) + query * model.hidden_size
    return attention + mlp_matrix_parameters(model, mixture, active)


def mlp_matrix_parameters(model: ModelConfig, mixture: bool = False, active: bool = False) -> int:
    """Weights of one layer's MLP, or of its experts and shared expert; arguments as in block_matrix_parameters."""
    width = model.moe_shared_expert_intermediate_size or 0 if mixture else model.ffn_hidden_size
    common = model.mlp_activation.num_matrices * model.hidden_size * width
    if not mixture:
        return common
    return common + (model.moe_router_topk if active else model.num_experts) * expert_matrix_parameters(model)


def expert_matrix_parameters(model: ModelConfig) -> int:
    """Weights of one expert; 0 in a dense model."""
    return model.expert_activation.num_matrices * model.hidden_size * (model.moe_ffn_hidden_size or 0)


def expert_parameters(model: ModelConfig) -> int:
    """Weights and biases of one expert."""
    width = model.expert_activation.num_inputs * model.moe_ffn_hidden_size + model.hidden_size
    return expert_matrix_parameters(model) + (0 if model.disable_bias_linear else width)


def _norm_parameters(model: ModelConfig, width: int) -> int:
    return width * (2 if model.normalization == "LayerNorm" else 1)
