"""Parameters and floating-point operations of a GPT model, component by component, from its configuration alone.

The one place where the model's size is written as a formula: the pipeline split balances by it, arithmetic/flops.py
adds it up for the throughput in the log, tools/plan.py predicts memory and time from it. Imports no torch.

Symbols: H hidden, q = heads * head width, kv = key/value heads * head width, F feed-forward width, V padded
vocabulary, S sequence length; m = 3 matrices in a SwiGLU MLP, else 2.
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
    the forward; recomputed work is not counted). `split`: of the parameters, those that tensor ranks share; the
    others lie whole on each of them.
    """

    parameters: int
    flops: int
    split: int = 0

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
    def flops(self) -> int:
        """Forward and backward FLOPs of the whole model for one sequence."""
        return sum(part.flops for part in (self.embedding, *self.layers, self.head))


@lru_cache(maxsize=64)
def model_costs(model: ModelConfig, seq_length: int) -> ModelCosts:
    """Costs of each component of `model` for sequences of `seq_length` tokens.

    FLOPs follow Megatron's count: 6 per weight and token in the matrix products, 6 S^2 q per layer for causal
    attention (scores and values, the masked half not counted); embedding look-up, norms and activations are free.

    The padded vocabulary has to be known (`model.padded_vocab_size`).
    """
    assert model.padded_vocab_size is not None, "the vocabulary has to be known before costs can be counted"
    hidden, vocabulary = model.hidden_size, model.padded_vocab_size
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    tied = not model.untie_embeddings_and_output_weights
    return ModelCosts(
        embedding=ComponentCost((vocabulary + positions) * hidden, flops=0, split=vocabulary * hidden),
        layers=(_layer_cost(model, seq_length),) * model.num_layers,
        head=ComponentCost(
            parameters=_norm_parameters(model, hidden) + (0 if tied else vocabulary * hidden),
            flops=6 * seq_length * hidden * vocabulary,
            split=0 if tied else vocabulary * hidden,
        ),
        shared_parameters=vocabulary * hidden if tied else 0,
    )


def _layer_cost(model: ModelConfig, seq_length: int) -> ComponentCost:
    query, matrices = model.num_attention_heads * model.kv_channels, block_matrix_parameters(model)
    return ComponentCost(
        parameters=matrices + _block_vector_parameters(model),
        flops=6 * seq_length * matrices + 6 * seq_length**2 * query,
        split=matrices + _column_biases(model),
    )


def block_matrix_parameters(model: ModelConfig) -> int:
    """Weights of the matrix products of one layer: attention's four projections and the MLP's two or three."""
    query = model.num_attention_heads * model.kv_channels
    key_value = model.num_query_groups * model.kv_channels
    attention = model.hidden_size * (query + 2 * key_value) + query * model.hidden_size
    return attention + mlp_matrix_parameters(model)


def mlp_matrix_parameters(model: ModelConfig) -> int:
    """Weights of one layer's MLP."""
    return model.mlp_activation.num_matrices * model.hidden_size * model.ffn_hidden_size


def _norm_parameters(model: ModelConfig, width: int) -> int:
    return width * (2 if model.normalization == "LayerNorm" else 1)


def _block_vector_parameters(model: ModelConfig) -> int:
    count = 2 * _norm_parameters(model, model.hidden_size) + _column_biases(model)
    if model.qk_layernorm:
        count += 2 * _norm_parameters(model, model.kv_channels)
    return count + (0 if model.disable_bias_linear else 2 * model.hidden_size)


def _column_biases(model: ModelConfig) -> int:
    """Biases of the projections into heads and feed-forward, which tensor ranks split as they do the weights."""
    count = 0
    if model.add_qkv_bias or not model.disable_bias_linear:
        count += (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    if not model.disable_bias_linear:
        count += model.mlp_activation.num_inputs * model.ffn_hidden_size
    return count
