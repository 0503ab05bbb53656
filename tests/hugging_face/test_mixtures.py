"""Families with experts against transformers: logits, gradients, both forms on disk, weights back; recorded cases."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_lite.config import ConfigError
from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.hugging_face.model_config import choose_family, model_config_json
from megatron_lite.hugging_face.weights import tensor_maps, to_ours, to_theirs
from megatron_lite.model.generation import Sampling, generate
from megatron_lite.model.gpt import GPTChunk, stored_shapes
from tests.hugging_face.models import ROTARY, VOCAB, random_tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "moe"
GROUPED = ROTARY | {"num_key_value_heads": 2, "moe_intermediate_size": 16}
SPARSE = GROUPED | {"num_experts": 8, "num_experts_per_tok": 2}
GLM = GROUPED | {"n_routed_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
CASES = {
    "mixtral": ("MixtralConfig", ROTARY | {"num_key_value_heads": 2, "num_local_experts": 4}),
    "mixtral-window-tied": (
        "MixtralConfig",
        ROTARY
        | {
            "num_key_value_heads": 2,
            "num_local_experts": 3,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", SPARSE | {"norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe-not-normed": ("Qwen3MoeConfig", SPARSE | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3_moe-steps": ("Qwen3MoeConfig", SPARSE | {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", SPARSE | {"shared_expert_intermediate_size": 24}),
    "olmoe": (
        "OlmoeConfig",
        ROTARY | {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None},
    ),
    "olmoe-normed": (
        "OlmoeConfig",
        ROTARY | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "pad_token_id": None},
    ),
    "glm4_moe": ("Glm4MoeConfig", GLM | {"use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-groups": (
        "Glm4MoeConfig",
        GLM
        | {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 2.5}
        | {"n_shared_experts": 2, "first_k_dense_replace": 2, "num_hidden_layers": 4},
    ),
}


def saved(name, folder):
    """The model of a case in a folder, as transformers saves it; its routers tell experts apart."""
    kind, settings = CASES[name]
    torch.manual_seed(3)
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "norm" in key:
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif key.endswith(("gate.weight", "e_score_correction_bias")):
                tensor.normal_()
            elif "experts" in key:
                tensor.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def our_model(folder):
    """The folder's model with gradients."""
    chunk = GPTChunk(folder.model, range(folder.model.num_layers))
    weights = dict(folder.our_tensors())
    for name, tensor in (*chunk.named_global_parameters(), *chunk.named_global_buffers()):
        tensor.data.copy_(weights.pop(name))
    assert not weights
    return chunk


def exported(chunk, folder):
    """Its tensors by their names."""
    ours = dict((*chunk.named_global_parameters(), *chunk.named_global_buffers()))
    maps = tensor_maps(folder.family, folder.model, stored_shapes(folder.model))
    return {
        entry.theirs: to_theirs(entry, [ours[name].data for name in entry.ours], folder.model)
        for entry in maps
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_round_trip(name, tmp_path):
    theirs, tokens = saved(name, tmp_path), random_tokens()
    folder = ModelFolder(tmp_path, vocabulary_multiple=16)
    ours = our_model(folder)
    with torch.no_grad():
        expected, seen = theirs(tokens).logits, ours.eval()(tokens)[..., :VOCAB]
    assert expected.std() > 0.1
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)

    theirs(tokens, labels=tokens).loss.backward()
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    (ours.train()(tokens, labels=labels).squeeze() / (labels != -100).sum()).backward()
    gradients, named = dict(ours.named_global_parameters()), dict(theirs.named_parameters())
    fused = tensor_maps(folder.family, folder.model, stored_shapes(folder.model), fused=True)
    seen = set()
    for entry in fused:  # as transformers has them in memory
        if entry.theirs in named:
            theirs_here = named[entry.theirs].grad
            for key, gradient in to_ours(entry, theirs_here, stored_shapes(folder.model), folder.model):
                scale = max(1.0, gradient.abs().max().item())
                torch.testing.assert_close(gradients[key].grad, gradient, rtol=1e-3, atol=1e-5 * scale)
                seen.add(key)
    assert seen == gradients.keys()

    stored = load_file(tmp_path / "model.safetensors")
    back = exported(ours, folder)
    assert back.keys() == stored.keys() and all(torch.equal(back[key], stored[key]) for key in stored)


@pytest.mark.parametrize("name", CASES)
def test_all_experts_in_one_tensor_are_read_too(name, tmp_path):
    """As transformers holds them in memory and newer families store them."""
    theirs = saved(name, tmp_path / "split")
    folder = ModelFolder(tmp_path / "split", vocabulary_multiple=16)
    (tmp_path / "fused").mkdir()
    shutil.copy(tmp_path / "split" / "config.json", tmp_path / "fused")
    state = {key: tensor.clone() for key, tensor in theirs.state_dict().items()}
    if theirs.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    assert any(key.endswith("experts.gate_up_proj") for key in state)
    save_file(state, tmp_path / "fused" / "model.safetensors")
    fused = ModelFolder(tmp_path / "fused", vocabulary_multiple=16)
    one, other = dict(folder.our_tensors()), dict(fused.our_tensors())
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", CASES)
def test_config_json_comes_back(name, tmp_path):
    """What is written as config.json is the same model to transformers, and to us."""
    theirs = saved(name, tmp_path)
    folder = ModelFolder(tmp_path, vocabulary_multiple=16)
    family = choose_family(folder.model, folder.family.architecture)
    written = model_config_json(folder.model, family, "float32", {})
    config = transformers.AutoConfig.for_model(**written)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(theirs.state_dict())
    tokens = random_tokens()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("name", CASES)
def test_greedy_generation_is_theirs(name, tmp_path):
    """Token by token with a cache, from the folder."""
    theirs, prompt = saved(name, tmp_path), random_tokens()[:1, :5]
    wanted = theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    ours = ModelFolder(tmp_path, vocabulary_multiple=16).load(torch.float32, "cpu")
    first = prompt[0].tolist()
    assert first + generate(ours, first, 12, Sampling()) == wanted[0].tolist()


RECORDED = sorted(path.name.removesuffix(".config.json") for path in GOLDEN.glob("hf_*.config.json"))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_cases(name, tmp_path):
    """Logits, loss and routing that transformers gave, from the weights and config.json as it wrote them."""
    case = np.load(GOLDEN / f"{name}.npz")
    weights = {
        key.removeprefix("weight/"): torch.from_numpy(case[key]) for key in case if key.startswith("weight/")
    }
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / f"{name}.config.json", tmp_path / "config.json")
    folder = ModelFolder(tmp_path, vocabulary_multiple=1)
    ours, tokens, logits = our_model(folder).eval(), torch.from_numpy(case["tokens"]), []
    for mixture in ours.mixtures.values():
        mixture.router.register_forward_hook(
            lambda router, x, _: logits.append(router.logits(*x).flatten(0, 1))
        )
    with torch.no_grad():
        seen = ours(tokens)
    wanted = torch.from_numpy(case["logits"])
    torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    loss = torch.nn.functional.cross_entropy(seen[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(float(case["loss_plain_next_token"]), rel=1e-5)
    routed = [torch.from_numpy(case[key]) for key in sorted(case) if key.startswith("router_logits/")]
    assert len(logits) == len(routed) > 0
    for mine, theirs in zip(logits, routed):
        chosen = folder.model.moe_router_topk
        assert torch.equal(mine.topk(chosen).indices, theirs.view_as(mine).topk(chosen).indices)
        torch.testing.assert_close(mine, theirs.view_as(mine), rtol=1e-5, atol=1e-5)
    back = exported(ours, folder)
    assert back.keys() == weights.keys() and all(torch.equal(back[key], weights[key]) for key in weights)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "qwen3_moe",
            {"num_experts": 9},
            "lacks 6 tensors of the model, the first is model.layers.0.mlp.experts.8",
        ),
        ("qwen3_moe", {"num_experts": 7}, "has 6 tensors that the model of its config.json has not"),
        ("qwen3_moe", {"moe_intermediate_size": 17}, "has shape [16, 32], by config.json it is [17, 32]"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "no layer has experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, wanted at least 1"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias = true"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("glm4_moe-groups", {"num_experts_per_tok": 6}, "wanted two experts of a chosen group"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = false"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "no layer has experts"),
    ],
)
def test_a_config_that_lies_is_refused(name, changes, words, tmp_path):
    saved(name, tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    for key, value in changes.items():  # transformers 5 writes num_experts as num_local_experts
        content.pop("num_local_experts" if key == "num_experts" else key, None)
        content[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        dict(ModelFolder(tmp_path).our_tensors())
    assert words in str(error.value)


def test_layers_of_multi_token_prediction_are_left_out(tmp_path):
    """transformers passes them over, so do we, and say so; a layer that config.json does not promise is an error."""
    saved("glm4_moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.2.{name}": torch.zeros(4) for name in ("eh_proj.weight", "enorm.weight")}
    save_file(weights | extra, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content.pop("num_mtp_layers", None)
    for promised in (1, 0):
        path.write_text(json.dumps(content | {"num_nextn_predict_layers": promised}))
        if promised:
            folder = ModelFolder(tmp_path, vocabulary_multiple=16)
            assert "2 tensors of multi-token prediction are left out" in folder.log
        else:
            with pytest.raises(ConfigError, match="has 2 tensors that the model"):
                ModelFolder(tmp_path, vocabulary_multiple=16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
            "--moe-shared-expert",
        ),
        ({"moe_router_topk_scaling_factor": 2.0}, "--moe-router-topk-scaling-factor 2.0"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "--moe-router-num-groups 2"),
        ({"moe_router_score_function": "sigmoid"}, "--moe-router-"),
    ],
)
def test_what_no_family_holds_is_refused_by_its_flag(changes, words, tmp_path):
    saved("qwen3_moe", tmp_path)
    model = replace(ModelFolder(tmp_path).model, **changes)
    with pytest.raises(ConfigError) as error:
        choose_family(model)
    assert words in str(error.value) and "has no counterpart for" in str(error.value)


def test_training_flags_of_a_mixture_choose_no_other_family(tmp_path):
    """Losses and formats of the router are no part of its logits."""
    saved("mixtral", tmp_path)
    model = ModelFolder(tmp_path).model
    trained = replace(
        model,
        ffn_hidden_size=128,  # of the dense layers, and there is none
        moe_aux_loss_coeff=(0.01,),
        moe_z_loss_coeff=1e-3,
        moe_router_dtype="fp32",
        moe_layer_freq=(1, 1),
    )
    family = choose_family(trained)
    assert family.architecture == "MixtralForCausalLM"
    assert family.write(trained)["intermediate_size"] == model.moe_ffn_hidden_size == 48
