"""Llama: RMSNorm, rotary positions, SwiGLU, grouped heads. Other families share most of it."""

from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.hugging_face.activation_names import GATED
from megatron_lite.hugging_face.family import TIED_HEAD, Family, Row, Weight, activation, always, same
from megatron_lite.hugging_face.fields import ConfigFields
from megatron_lite.hugging_face.rope import read_rope, write_rope

WIDTH = same("intermediate_size", "ffn_hidden_size", needed=True)
# Of every family beside, with other rows for the width of its MLPs and for the rotary positions.
COMMON = (
    same("vocab_size", "vocab_size", needed=True),
    same("num_hidden_layers", "num_layers", needed=True),
    same("hidden_size", "hidden_size", needed=True),
    same("num_attention_heads", "num_attention_heads", needed=True),
    same("num_key_value_heads", "num_query_groups"),
    same("head_dim", "kv_channels"),
    same("max_position_embeddings", "max_position_embeddings"),
    same("rms_norm_eps", "norm_epsilon", float),
    same("initializer_range", "init_method_std", float),
    same("attention_dropout", "attention_dropout", float),
    activation("hidden_act", GATED),
    TIED_HEAD,
    always(normalization="RMSNorm", hidden_dropout=0.0),
)
ROPE = Row(read_rope, write_rope)
ROWS = (*COMMON, WIDTH, ROPE)
NO_BIAS = always(disable_bias_linear=True)

WEIGHTS = (
    Weight("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
    Weight("model.layers.{layer}.input_layernorm.weight", "layers.{layer}.input_norm.weight"),
    Weight("model.layers.{layer}.self_attn.q_proj.{kind}", "layers.{layer}.attention.q_proj.{kind}"),
    Weight("model.layers.{layer}.self_attn.k_proj.{kind}", "layers.{layer}.attention.k_proj.{kind}"),
    Weight("model.layers.{layer}.self_attn.v_proj.{kind}", "layers.{layer}.attention.v_proj.{kind}"),
    Weight("model.layers.{layer}.self_attn.o_proj.{kind}", "layers.{layer}.attention.o_proj.{kind}"),
    Weight("model.layers.{layer}.self_attn.q_norm.weight", "layers.{layer}.attention.q_norm.weight"),
    Weight("model.layers.{layer}.self_attn.k_norm.weight", "layers.{layer}.attention.k_norm.weight"),
    Weight("model.layers.{layer}.post_attention_layernorm.weight", "layers.{layer}.pre_mlp_norm.weight"),
    Weight("model.layers.{layer}.mlp.gate_proj.{kind}", "layers.{layer}.mlp.gate_proj.{kind}"),
    Weight("model.layers.{layer}.mlp.up_proj.{kind}", "layers.{layer}.mlp.up_proj.{kind}"),
    Weight("model.layers.{layer}.mlp.down_proj.{kind}", "layers.{layer}.mlp.down_proj.{kind}"),
    Weight("model.norm.weight", "final_norm.weight"),
    Weight("lm_head.weight", "lm_head.weight"),
)


def _read_biases(fields: ConfigFields) -> dict[str, Any]:
    """Biases are on all linear layers here or on none."""
    attention, mlp = (fields.take(name, bool) or False for name in ("attention_bias", "mlp_bias"))
    if attention != mlp:
        fields.refuse(f"attention_bias = {str(attention).lower()} but mlp_bias = {str(mlp).lower()}")
    return {"disable_bias_linear": not (attention and mlp)}


def _write_biases(model: ModelConfig) -> dict[str, Any]:
    return dict.fromkeys(("attention_bias", "mlp_bias"), not model.disable_bias_linear)


FAMILY = Family("LlamaForCausalLM", "llama", (*ROWS, Row(_read_biases, _write_biases)), WEIGHTS)
