"""Every family against transformers: logits, loss, gradients, and the weights back, bit by bit."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_lite.config import ConfigError, ModelConfig
from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.hugging_face.model_config import choose_family, model_config_json
from megatron_lite.hugging_face.weights import tensor_maps, to_ours, to_theirs
from megatron_lite.model.gpt import GPTChunk, parameter_shapes
from tests.hugging_face.models import CASES, VOCAB, random_tokens, saved


def our_model(folder):
    """GPTChunk with the weights of a folder."""
    chunk = GPTChunk(folder.model, range(folder.model.num_layers))
    parameters = dict(chunk.named_global_parameters())
    shapes = parameter_shapes(folder.model)
    for entry in folder.maps:
        for name, tensor in to_ours(entry, folder.read(entry.theirs), shapes, folder.model):
            parameters.pop(name).data.copy_(tensor)
    assert not parameters
    return chunk.eval()


def their_gradients_as_ours(theirs, folder):
    shapes = parameter_shapes(folder.model)
    named = dict(theirs.named_parameters())
    return {
        name: gradient
        for entry in folder.maps
        for name, gradient in to_ours(entry, named[entry.theirs].grad, shapes, folder.model)
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_gradient_and_round_trip(name, tmp_path):
    theirs = saved(name, tmp_path)
    folder = ModelFolder(tmp_path, vocabulary_multiple=16)
    assert folder.model.padded_vocab_size == 64 and folder.model.vocab_size == VOCAB
    ours = our_model(folder)
    tokens = random_tokens()
    with torch.no_grad():
        expected = theirs(tokens).logits
        seen = ours(tokens)[..., :VOCAB]
    assert expected.std() > 0.1
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)

    loss = theirs(tokens, labels=tokens).loss
    loss.backward()
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    our_loss = ours(tokens, labels=labels).squeeze() / (labels != -100).sum()
    our_loss.backward()
    torch.testing.assert_close(our_loss, loss, rtol=1e-5, atol=1e-5)
    gradients = dict(ours.named_global_parameters())
    for key, gradient in their_gradients_as_ours(theirs, folder).items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradients[key].grad, gradient, rtol=1e-3, atol=1e-5 * max(scale, 1.0))

    stored = load_file(tmp_path / "model.safetensors")
    for entry in folder.maps:
        back = to_theirs(entry, [gradients[part].data for part in entry.ours], folder.model)
        assert torch.equal(back, stored.pop(entry.theirs))
    assert not stored


OURS = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=8,
    max_position_embeddings=64,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    vocab_size=VOCAB,
    padded_vocab_size=64,
)
# What no Hugging Face model has, and is rewritten on the way out.
REWRITTEN = {
    "norms stored as w - 1": {"apply_layernorm_1p": True, "qk_layernorm": True},
    "neighbours rotated": {"rotary_interleaved": True},
    "neighbours rotated, normed heads": {"rotary_interleaved": True, "qk_layernorm": True},
    "neighbours rotated, biases": {"rotary_interleaved": True, "add_qkv_bias": True},
    "layer norm as w - 1": {
        "apply_layernorm_1p": True,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "disable_bias_linear": False,
        "group_query_attention": False,
        "num_query_groups": 4,
    },
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_what_is_rewritten_on_the_way_out(case):
    model = replace(OURS, **REWRITTEN[case])
    chunk = GPTChunk(model, range(2)).eval()
    generator = torch.Generator().manual_seed(2)
    weights = dict(chunk.named_global_parameters())
    for name, parameter in weights.items():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        if "norm" in name.split(".")[-2] and not model.apply_layernorm_1p:
            parameter.data += 1.0
    family = choose_family(model)
    config = transformers.AutoConfig.for_model(**model_config_json(model, family, "float32", {}))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = {
        entry.theirs: to_theirs(entry, [weights[part].data for part in entry.ours], model)
        for entry in tensor_maps(family, model, weights)
    }
    told = theirs.load_state_dict(state, strict=False)
    assert not told.unexpected_keys and set(told.missing_keys) <= {"lm_head.weight"}
    tokens = random_tokens()
    with torch.no_grad():
        torch.testing.assert_close(chunk(tokens)[..., :VOCAB], theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"squared_relu": True, "swiglu": False}, "--activation squared_relu"),
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ({"position_embedding_type": "none"}, "--position-embedding-type none"),
        ({"disable_bias_linear": False, "window_size": (8, 0)}, "--window-size"),
        (
            {"qk_layernorm": True, "add_qkv_bias": True},
            "Qwen2ForCausalLM has no counterpart for --qk-layernorm",
        ),
    ],
)
def test_a_model_without_counterpart_is_refused_by_flag(changes, words):
    with pytest.raises(ConfigError, match=words):
        choose_family(replace(OURS, **changes))


@pytest.mark.parametrize("name", CASES)
def test_config_there_and_back(name, tmp_path):
    """config.json written from our flags gives transformers the same model, and us the same flags."""
    theirs = saved(name, tmp_path)
    before = ModelFolder(tmp_path)
    family = choose_family(before.model)
    if "no-window" not in name:  # without a window Mistral computes what Llama computes
        assert family.architecture == theirs.config.architectures[0]
    content = model_config_json(before.model, family, "float32", {"bos": 1, "eos": 2})
    (tmp_path / "config.json").write_text(json.dumps(content))
    after = ModelFolder(tmp_path)
    assert after.model == before.model
    again = (
        type(theirs).from_pretrained(tmp_path)
        if family.architecture == theirs.config.architectures[0]
        else None
    )
    if again is not None:
        tokens = random_tokens()
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
