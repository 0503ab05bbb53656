"""Tiny models of transformers with random weights: what the conversions are judged by."""

import torch
import transformers

VOCAB = 61  # odd: the padded vocabulary has rows that transformers has not
SEQ_LENGTH = 24
ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 2e-5,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# transformers 4 has its rotary settings in two fields, 5 in one.
BEFORE_5 = int(transformers.__version__.split(".")[0]) < 5


def rope(theta, scaling=None):
    """The rotary fields that the installed transformers reads."""
    if BEFORE_5:
        return {"rope_theta": theta, "rope_scaling": scaling}
    return {"rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": theta}}


GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_inner": 80,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
    "layer_norm_epsilon": 2e-5,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "attn_implementation": "eager",
}


def _cases():
    rotary = {
        "llama": ("LlamaConfig", rope(500.0)),
        "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
        "llama3-scaling": ("LlamaConfig", rope(1000.0, LLAMA3)),
        "llama-head-dim": ("LlamaConfig", {"head_dim": 12}),
        "mistral": ("MistralConfig", {"sliding_window": 7}),
        "mistral-no-window": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
        "qwen2": ("Qwen2Config", {}),
        "qwen2-window": (
            "Qwen2Config",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
        ),
        "qwen3": ("Qwen3Config", {"head_dim": 16}),
    }
    for name, (kind, extra) in rotary.items():
        for heads, groups in (("mha", 4), ("gqa", 2)):
            for tied in (False, True):
                settings = ROTARY | {"num_key_value_heads": groups, "tie_word_embeddings": tied} | extra
                yield f"{name}-{heads}-{'tied' if tied else 'untied'}", kind, settings
    for tied in (False, True):
        yield f"gpt2-{'tied' if tied else 'untied'}", "GPT2Config", GPT2 | {"tie_word_embeddings": tied}
    for name in ("relu2", "gelu"):
        yield f"gpt2-{name}", "GPT2Config", GPT2 | {"activation_function": name}


CASES = {name: (kind, settings) for name, kind, settings in _cases()}


def build(name, **changes):
    """A model of transformers in fp32; biases and norms are random too, so that none can be lost unseen."""
    kind, settings = CASES[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, kind)(**(settings | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def saved(name, folder, **changes):
    """The same model, saved by transformers."""
    model = build(name, **changes)
    model.save_pretrained(folder)
    return model


def random_tokens(rows=2, length=SEQ_LENGTH, vocab=VOCAB, seed=5):
    """Tokens [rows, length]."""
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
