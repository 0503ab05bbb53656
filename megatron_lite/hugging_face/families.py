"""The architectures of transformers that this model can be, as data. Imports no torch."""

from dataclasses import dataclass
from typing import Any

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GPT2 = "GPT2LMHeadModel"


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        architecture: the class of transformers.
        model_type: its name in config.json.
        defaults: {field: value} that the configuration class of transformers takes when config.json is silent
            (a test holds them equal to transformers'). Sizes that no sane file leaves out have no default here.
    """

    architecture: str
    model_type: str
    defaults: dict[str, Any]


_ROTARY_DEFAULTS = {
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_BOS_1_EOS_2 = {"bos_token_id": 1, "eos_token_id": 2}
_SLIDING_DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            LLAMA,
            "llama",
            _ROTARY_DEFAULTS
            | _BOS_1_EOS_2
            | {
                "num_key_value_heads": None,
                "max_position_embeddings": 2048,
                "attention_bias": False,
                "mlp_bias": False,
            },
        ),
        Family(
            MISTRAL,
            "mistral",
            _ROTARY_DEFAULTS
            | _BOS_1_EOS_2
            | {"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096},
        ),
        Family(
            QWEN2,
            "qwen2",
            _ROTARY_DEFAULTS
            | _SLIDING_DEFAULTS
            | {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        ),
        Family(
            QWEN3,
            "qwen3",
            _ROTARY_DEFAULTS
            | _SLIDING_DEFAULTS
            | {
                "num_key_value_heads": 32,
                "max_position_embeddings": 32768,
                "head_dim": 128,
                "attention_bias": False,
            },
        ),
        Family(
            GPT2,
            "gpt2",
            {
                "n_inner": None,
                "activation_function": "gelu_new",
                "resid_pdrop": 0.1,
                "embd_pdrop": 0.1,
                "attn_pdrop": 0.1,
                "layer_norm_epsilon": 1e-5,
                "initializer_range": 0.02,
                "tie_word_embeddings": True,
                "bos_token_id": 50256,
                "eos_token_id": 50256,
                "pad_token_id": None,
            },
        ),
    )
}

# Fields of config.json, of any architecture, that change what a model computes, with the values that change nothing.
# A family that can hold a field reads it; for all others a value not listed here is refused by name.
MATHS_FIELDS: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_in_fp32": (False, True),
    "attention_k_eq_v": (False,),
    "attention_multiplier": (),
    "attention_out_bias": (False,),
    "attn_logit_softcapping": (0, 0.0),
    "attn_temperature_tuning": (False, 0),
    "clip_qkv": (),
    "cross_layer_kv_sharing": (False,),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1, 1.0),
    "embed_scale": (1, 1.0),
    "final_logit_softcapping": (0, 0.0),
    "first_k_dense_replace": (),
    "hidden_act": ("silu", "swish"),
    "is_encoder_decoder": (False,),
    "kv_lora_rank": (),
    "layer_types": (),
    "layernorm_epsilon": (),
    "layer_norm_epsilon": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "mlp_bias": (False,),
    "moe_intermediate_size": (0,),
    "multi_query": (False,),
    "no_rope_layers": ([],),
    "num_experts": (0, 1),
    "num_experts_per_tok": (0,),
    "num_local_experts": (0, 1),
    "num_nextn_predict_layers": (0,),
    "n_routed_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pruned_heads": ({},),
    "q_lora_rank": (),
    "qk_layernorm": (False,),
    "qkv_bias": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1, 1.0),
    "rotary_dim": (),
    "rotary_pct": (1, 1.0),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "scale_embedding": (False,),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "sliding_window": (),
    "use_cross_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_qkv_bias": (False,),
    "use_sliding_window": (False,),
}
