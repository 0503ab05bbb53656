"""Text from a model: greedy or by sampling, with a cache of the keys and values of earlier positions.

Shapes: S prompt, V padded vocabulary, v true vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from megatron_lite.config.declare import ConfigError
from megatron_lite.model.attention import KeyValueCache
from megatron_lite.model.gpt import GPTChunk


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature 0 takes the most likely token. Otherwise logits are divided by it, then only the top_k most likely
    tokens stay, then of these the fewest whose probabilities sum to top_p or more (as transformers does).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


def next_token_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """logits [v] -> probabilities [v], fp32; for a temperature above 0."""
    # From the largest on, in fp64: a tiny temperature then leaves it 0, and is near to taking the most likely token.
    logits = logits.double()
    logits = ((logits - logits.max()) / sampling.temperature).float()
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    probabilities = logits.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # what the likelier tokens sum to
        dropped = order[before >= sampling.top_p]
        probabilities = probabilities.index_fill(0, dropped, 0.0)
        probabilities = probabilities / probabilities.sum()
    return probabilities


@torch.no_grad()
def generate(
    model: GPTChunk,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    stop: Collection[int] = (),
) -> list[int]:
    """New tokens after a prompt.

    Args:
        model: all layers, in evaluation mode.
        prompt: at least one token id below the true vocabulary size.
        generator: on the CPU; decides what is sampled.
        stop: ids that end the text; the one met is not returned.

    Raises:
        ConfigError: for an empty prompt, an id outside the vocabulary, or more positions than the model has learned.
    """
    _check(model, prompt, max_new_tokens)
    device = next(model.parameters()).device
    caches = {number: KeyValueCache() for number in model.layers}
    tokens = torch.tensor([list(prompt)], device=device)
    new: list[int] = []
    while len(new) < max_new_tokens:
        logits = model(tokens, caches=caches)[0, -1, : model.config.vocab_size].cpu()
        if sampling.temperature == 0:
            chosen = int(logits.argmax())
        else:
            weights = next_token_probabilities(logits, sampling)
            chosen = int(torch.multinomial(weights, 1, generator=generator))
        if chosen in stop:
            break
        new.append(chosen)
        tokens = torch.tensor([[chosen]], device=device)
    return new


def _check(model: GPTChunk, prompt: Sequence[int], max_new_tokens: int) -> None:
    if not prompt:
        raise ConfigError("the prompt is empty, wanted at least one token")
    size = model.config.vocab_size
    outside = [number for number in prompt if not 0 <= number < size]
    if outside:
        raise ConfigError(f"the prompt has token {outside[0]}, wanted ids from 0 to {size - 1:,}")
    limit = model.config.max_position_embeddings
    if model.config.position_embedding_type == "learned_absolute" and len(prompt) + max_new_tokens > limit:
        raise ConfigError(
            f"the prompt's {len(prompt):,} tokens and --max-new-tokens {max_new_tokens:,} need more positions than "
            f"the {limit:,} that the model has learned"
        )
