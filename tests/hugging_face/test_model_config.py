"""What config.json may say, what is refused by name, what is told."""

import json

import pytest

from megatron_lite.config import ConfigError
from megatron_lite.files.reading import read_object
from megatron_lite.hugging_face.model_config import read_model_config

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
QWEN = GOOD | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 300,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def without(content, *names):
    return {key: value for key, value in content.items() if key not in names}


def read(content):
    return read_model_config(content, "DIR/config.json")


def test_a_good_file():
    model, family, log = read(GOOD)
    assert family.model_type == "llama"
    assert (model.hidden_size, model.num_query_groups, model.kv_channels) == (32, 2, 8)
    assert model.hidden_dropout == model.attention_dropout == 0.0
    assert (model.vocab_size, model.padded_vocab_size) == (300, 384)
    assert "rope_theta = 10000.0" in log


def test_a_missing_optional_field_is_told():
    model, _, log = read(
        without(GOOD, "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    )
    assert (model.num_query_groups, model.norm_epsilon, model.rotary_base) == (4, 1e-6, 10000.0)
    assumed = [line for line in log if "what transformers assumes" in line]
    for name in ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"):
        assert any(line.startswith(name) for line in assumed), name


def test_rope_from_each_place():
    places = (
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 500000, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}},
    )
    for place in places:
        assert read(without(GOOD, "rope_theta") | place)[0].rotary_base == 5e5
    for place in (
        {"rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}},
        {"rope_scaling": {"type": "llama3"} | without(LLAMA3, "rope_type")},
    ):
        model = read(GOOD | place)[0]
        assert model.use_rope_scaling and model.rope_scaling_factor == 8.0
        assert model.rope_scaling_original_max_position_embeddings == 8192


REFUSED = {
    "required": (without(GOOD, "hidden_size", "num_hidden_layers"), ["has no num_hidden_layers"]),
    "maths": (
        GOOD | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "sliding_window": 16},
        ["rope_type = 'yarn'", "sliding_window = 16"],
    ),
    "all of 04": (
        GOOD
        | {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "attention_bias": True,
            "mlp_bias": True,
            "sliding_window": 16,
        },
        ["yarn", "sliding_window = 16"],
    ),
    "one bias": (GOOD | {"attention_bias": True}, ["attention_bias = true but mlp_bias = false"]),
    "architecture": (
        GOOD | {"architectures": ["MambaForCausalLM"]},
        ["MambaForCausalLM", "LlamaForCausalLM"],
    ),
    "no architecture": (without(GOOD, "architectures") | {"model_type": "mamba"}, ["mamba"]),
    "theta conflict": (
        GOOD | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ["rope_parameters.rope_theta is 500000.0", "rope_theta is 10000.0"],
    ),
    "scaling conflict": (
        GOOD | {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3 | {"factor": 4.0}},
        ["rope_parameters.factor is 8.0", "rope_scaling.factor is 4.0"],
    ),
    "type conflict": (
        GOOD | {"rope_scaling": {"type": "linear", "rope_type": "default"}},
        ["rope_scaling.rope_type is default", "rope_scaling.type is linear"],
    ),
    "llama3 key": (GOOD | {"rope_scaling": without(LLAMA3, "factor")}, ["llama3 needs factor"]),
    "linear": (GOOD | {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear"]),
    "stray factor": (GOOD | {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, ["factor = 2.0"]),
    "partial": (GOOD | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
    "theta": (GOOD | {"rope_theta": -1}, ["--rotary-base", "'-1.0'"]),
    "activation": (GOOD | {"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
    "softcap": (GOOD | {"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0"]),
    "multiplier": (GOOD | {"attention_multiplier": 0.1}, ["attention_multiplier = 0.1"]),
    "quantized": (GOOD | {"quantization_config": {"bits": 4}}, ["quantization_config"]),
    "type of a value": (GOOD | {"hidden_size": "32"}, ["hidden_size is '32'", "a whole number"]),
    "zero": (GOOD | {"num_attention_heads": 0}, ["num_attention_heads is 0", "at least 1"]),
    "groups": (GOOD | {"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
    "width": (GOOD | {"hidden_size": 30}, ["30", "4 heads"]),
    "some layers": (
        QWEN | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        ["max_window_layers = 1", "in all layers or in none"],
    ),
    "gpt2 activation": (GPT2 | {"activation_function": "mish"}, ["activation_function = 'mish'"]),
    "gpt2 scale": (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
    "too many layer types": (
        QWEN | {"layer_types": ["full_attention"] * 5},
        ["layer_types of 5 layers", "num_hidden_layers is 2"],
    ),
    "factors crossed": (
        GOOD | {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        ["low_freq_factor is 4", "less than high_freq_factor 1"],
    ),
    "other model type": (GOOD | {"model_type": "mistral"}, ["LlamaForCausalLM", "model_type is mistral"]),
    "architectures of objects": (GOOD | {"architectures": [{}]}, ["architectures is [{}]"]),
    "epsilon": (GOOD | {"rms_norm_eps": 0.0}, ["--norm-epsilon", "'0.0'"]),
    "endless epsilon": (GOOD | {"rms_norm_eps": float("inf")}, ["--norm-epsilon", "'inf'"]),
    "dropout": (GOOD | {"attention_dropout": 2.0}, ["--attention-dropout", "'2.0'"]),
    "gpt2 alias": (GPT2 | {"num_hidden_layers": 1}, ["n_layer is 2", "num_hidden_layers is 1"]),
    "gpt2 dropout": (GPT2 | {"embd_pdrop": 0.0}, ["resid_pdrop = 0.1 but embd_pdrop = 0.0"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    content, words = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        read(content)
    message = str(caught.value)
    assert message.startswith("DIR/config.json") and "\n" not in message
    for word in words:
        assert word in message


def test_harmless_fields_load_and_are_told():
    _, _, log = read(GOOD | {"my_note": {"a": 1}, "final_logit_softcapping": None, "pretraining_tp": 2})
    assert 'my_note = {"a": 1} ignored' in log


def test_full_attention_in_every_layer_changes_nothing():
    model, _, log = read(GOOD | {"layer_types": ["full_attention"] * 2})
    assert model.window_size is None
    assert any("layer_types" in line and "changes nothing" in line for line in log)
    with pytest.raises(ConfigError, match="layer_types"):
        read(GOOD | {"layer_types": ["full_attention", "sliding_attention"]})


def test_gpt2_under_its_other_names():
    """transformers' GPT2Config reads n_embd from hidden_size, and so on."""
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    renamed = {names.get(name, name): value for name, value in GPT2.items()}
    assert read(renamed)[0] == read(GPT2)[0] == read(renamed | GPT2)[0]


def test_windows_of_qwen():
    settings = {"use_sliding_window": True, "sliding_window": 8}
    assert read(QWEN | settings | {"max_window_layers": 0})[0].window_size == (7, 0)
    assert read(QWEN | settings | {"max_window_layers": 2})[0].window_size is None
    assert read(QWEN | settings | {"use_sliding_window": False})[0].window_size is None
    sliding = {"layer_types": ["sliding_attention"] * 2, "max_window_layers": 28}
    assert read(QWEN | settings | sliding)[0].window_size == (7, 0)


@pytest.mark.parametrize(
    "content", ['﻿<?xml version="1.0"?><Error/>', "[1]", "", "{", "\udcff", "[" * 100_000]
)
def test_a_file_that_is_no_config(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match="config.json"):
        read_object(path)
    path.write_text(json.dumps(GOOD))
    assert read_object(path) == GOOD
