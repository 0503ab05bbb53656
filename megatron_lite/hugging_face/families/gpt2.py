"""GPT-2: learned positions, LayerNorm, biases; matrices stored [in, out], query, key and value side by side."""

from typing import Any

from megatron_lite.config.model import ModelConfig
from megatron_lite.hugging_face.activation_names import PLAIN
from megatron_lite.hugging_face.family import TIED_HEAD, Family, Row, Weight, activation, always, same
from megatron_lite.hugging_face.fields import ConfigFields


def _read_dropouts(fields: ConfigFields) -> dict[str, Any]:
    residual, embedding = fields.take("resid_pdrop", float), fields.take("embd_pdrop", float)
    if residual != embedding:
        fields.refuse(f"resid_pdrop = {residual} but embd_pdrop = {embedding}")
    return {"hidden_dropout": residual}


def _write_dropouts(model: ModelConfig) -> dict[str, Any]:
    return dict.fromkeys(("resid_pdrop", "embd_pdrop"), model.hidden_dropout)


ROWS = (
    same("vocab_size", "vocab_size", needed=True),
    same("n_layer", "num_layers", needed=True),
    same("n_embd", "hidden_size", needed=True),
    same("n_inner", "ffn_hidden_size"),
    same("n_head", "num_attention_heads", needed=True),
    same("n_positions", "max_position_embeddings", needed=True),
    same("layer_norm_epsilon", "norm_epsilon", float),
    same("initializer_range", "init_method_std", float),
    same("attn_pdrop", "attention_dropout", float),
    Row(_read_dropouts, _write_dropouts),
    activation("activation_function", PLAIN),
    TIED_HEAD,
    always(position_embedding_type="learned_absolute", normalization="LayerNorm"),
)
QKV = tuple(f"layers.{{layer}}.attention.{name}_proj.{{kind}}" for name in "qkv")
WEIGHTS = (
    Weight("transformer.wte.weight", "embedding.word_embeddings.weight"),
    Weight("transformer.wpe.weight", "embedding.position_embeddings.weight"),
    Weight("transformer.h.{layer}.ln_1.{kind}", "layers.{layer}.input_norm.{kind}"),
    Weight("transformer.h.{layer}.attn.c_attn.{kind}", QKV, transposed=True),
    Weight("transformer.h.{layer}.attn.c_proj.{kind}", "layers.{layer}.attention.o_proj.{kind}", True),
    Weight("transformer.h.{layer}.ln_2.{kind}", "layers.{layer}.pre_mlp_norm.{kind}"),
    Weight("transformer.h.{layer}.mlp.c_fc.{kind}", "layers.{layer}.mlp.up_proj.{kind}", True),
    Weight("transformer.h.{layer}.mlp.c_proj.{kind}", "layers.{layer}.mlp.down_proj.{kind}", True),
    Weight("transformer.ln_f.{kind}", "final_norm.{kind}"),
    Weight("lm_head.weight", "lm_head.weight"),
)

FAMILY = Family("GPT2LMHeadModel", "gpt2", ROWS, WEIGHTS)
