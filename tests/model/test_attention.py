"""Query and key norms, of a head and of all heads, equal transformers' with the same weights; with a cache too."""

import pytest
import torch
from transformers import OlmoeConfig, Qwen3Config
from transformers.models.olmoe.modeling_olmoe import OlmoeAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from megatron_lite.config import ModelConfig
from megatron_lite.model.attention import KeyValueCache, SelfAttention
from megatron_lite.model.rotary import RotaryEmbedding

LENGTH, HIDDEN, HEADS, WIDTH = 7, 32, 4, 8
CPU = torch.device("cpu")


def attention_of_transformers(kind, config_class, groups):
    """Its weights drawn, those of the norms far from 1."""
    config = config_class(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=groups,
        head_dim=WIDTH,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theirs = kind(config, layer_idx=0).eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3, generator=generator)
    return theirs


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize(
    ("kind", "config_class", "across_heads"),
    [(OlmoeAttention, OlmoeConfig, True), (Qwen3Attention, Qwen3Config, False)],
)
def test_norms_of_query_and_key_equal_transformers(kind, config_class, across_heads, groups):
    theirs = attention_of_transformers(kind, config_class, groups)
    model = ModelConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=groups,
        kv_channels=WIDTH,
        normalization="RMSNorm",
        disable_bias_linear=True,
        position_embedding_type="rope",
        attention_dropout=0.0,
        qk_layernorm=True,
        qk_layernorm_across_heads=across_heads,
    )
    ours = SelfAttention(model)
    ours.load_state_dict(theirs.state_dict())
    assert ours.k_norm.weight.shape == (groups * WIDTH if across_heads else WIDTH,)
    x = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(6))
    positions = torch.arange(LENGTH)[None]
    rotary = RotaryEmbedding(model)
    whole = rotary(LENGTH, CPU, positions)
    mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    wanted, _ = theirs(x, (whole.cos[:, :, 0], whole.sin[:, :, 0]), mask)
    torch.testing.assert_close(ours(x, whole), wanted, atol=1e-5, rtol=0)

    cache, parts = KeyValueCache(), []
    for start, end in ((0, 4), (4, 5), (5, 7)):
        rotation = rotary(end - start, CPU, positions[:, start:end])
        parts.append(ours(x[:, start:end], rotation, cache=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted, atol=1e-5, rtol=0)
