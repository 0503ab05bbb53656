"""Other code bases that happen to be installed, as contestants of the suite `step`: same weights, same batches."""

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
from torch import nn

from tools.benchmarks.baseline_model import (
    CLIP,
    NORM_EPSILON,
    ROTARY_BASE,
    BareModel,
    Sizes,
    build_optimizer,
    mean_loss,
    train_step,
)
from tools.benchmarks.our_run import load_initial_weights, run_config
from tools.benchmarks.our_step import PreparedBatches

Step = Callable[[], float]
Batch = dict[str, torch.Tensor]

# Our names -> transformers' for Llama, piece by piece.
LLAMA_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "final_norm": "model.norm",
    "layers": "model.layers",
    "attention": "self_attn",
    "input_norm": "input_layernorm",
    "pre_mlp_norm": "post_attention_layernorm",
}


def peer_steps(sizes: Sizes, batches: list[Batch], microbatches: int) -> tuple[dict[str, Step], list[str]]:
    """({name: one step}, facts: versions, and which were left out for not being installed)."""
    steps: dict[str, Step] = {}
    facts = []
    for package, name, build in (
        ("transformers", "transformers' Llama", transformers_step),
        ("accelerate", "accelerate's loop", accelerate_step),
    ):
        if importlib.util.find_spec(package) is None:
            facts.append(f"{name}: left out, {package} is not installed.")
            continue
        steps[name] = build(sizes, batches, microbatches)
        facts.append(f"{name}: {package} {importlib.metadata.version(package)}.")
    facts.append("accelerate's FSDP2 has no CPU form (its CPU backend takes the DDP way), so it is not here.")
    facts.append("A nanoGPT-style loop is what `bare` is.")
    return steps, facts


class Logits(nn.Module):
    """A model of transformers as a function from tokens [B, S] to logits [B, S, V]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Nothing is cached: it is training."""
        return self.model(input_ids=tokens, use_cache=False).logits


def transformers_step(sizes: Sizes, batches: list[Batch], microbatches: int) -> Step:
    """LlamaForCausalLM in the bare loop, with SDPA and the same fused AdamW."""
    import transformers  # an optional package

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.ffn,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            max_position_embeddings=sizes.seq_length,
            rms_norm_eps=NORM_EPSILON,
            rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    ).train()
    weights = initial_model(sizes).state_dict()
    model.load_state_dict({llama_name(name): tensor for name, tensor in weights.items()})
    logits, optimizer = Logits(model), build_optimizer(model)
    loader = PreparedBatches(batches)
    return lambda: train_step(logits, optimizer, loader.next_batch(len(batches[0]["tokens"])), microbatches)


def accelerate_step(sizes: Sizes, batches: list[Batch], microbatches: int) -> Step:
    """The bare model in accelerate's loop: prepare, accumulate, backward, clip_grad_norm_."""
    import accelerate  # an optional package

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=microbatches)
    model = initial_model(sizes)
    model, optimizer = accelerator.prepare(model, build_optimizer(model))
    loader = PreparedBatches(batches)

    def step() -> float:
        batch, loss = loader.next_batch(len(batches[0]["tokens"])), 0.0
        for tokens, labels in zip(batch["tokens"].chunk(microbatches), batch["labels"].chunk(microbatches)):
            with accelerator.accumulate(model):
                part = mean_loss(model(tokens), labels)
                accelerator.backward(part)
                loss += part.detach() / microbatches
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        return loss.item()

    return step


def initial_model(sizes: Sizes) -> BareModel:
    """The bare model with the weights that all start from."""
    model = BareModel(sizes)
    load_initial_weights(model, run_config(sizes))
    return model


def llama_name(name: str) -> str:
    """Our name of a parameter -> transformers'."""
    for ours, theirs in LLAMA_NAMES.items():
        name = name.replace(ours, theirs)
    return name
