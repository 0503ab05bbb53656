"""Proof of a conversion: logits of this model and of transformers on the same tokens, in fp32.

Ours is run layer by layer from the stored weights, so that only theirs is ever whole in memory.
Shapes: B rows, S positions, v true vocabulary.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from megatron_lite.config.declare import ConfigError
from megatron_lite.config.model import ModelConfig
from megatron_lite.files.command_line import RunError, number
from megatron_lite.hugging_face.family import Family
from megatron_lite.model.gpt import ReadTensor, load_chunk

Prompts = dict[str, torch.Tensor]
RANDOM_ROWS, RANDOM_LENGTH = 2, 64
# Windows up to this many tokens are crossed by the prompts; a longer prompt would take minutes on a CPU.
CROSSED_WINDOW = 1024


class VerificationError(RunError):
    """Both sides computed different logits: the conversion is wrong, its result is removed."""


def add_verification_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a program that verifies a conversion: `tolerance`, None = no comparison."""
    parser.add_argument(
        "--tolerance",
        type=number(0, float),
        default=1e-4,
        help="largest difference of logits, as part of the largest logit (default: 1e-4)",
    )
    parser.add_argument(
        "--no-verify",
        dest="tolerance",
        action="store_const",
        const=None,
        help="do not compare logits with transformers",
    )


def verify(
    model: ModelConfig,
    read: ReadTensor,
    folder: Path,
    family: Family,
    texts: Sequence[Sequence[int]],
    tolerance: float,
    log: Callable[[str], None],
) -> None:
    """Compare this model's logits with those of transformers, which loads the folder.

    Args:
        read: gives our parameter by its global name.
        texts: token ids of real texts.
        tolerance: largest difference, as part of the largest logit.

    Raises:
        ConfigError: when transformers cannot load the folder.
        VerificationError: when the logits differ by more.
    """
    prompts = make_prompts(model, texts)
    ours, theirs = our_logits(model, read, prompts), their_logits(folder, family.architecture, prompts)
    wrong = []
    for name, a, b in zip(prompts, ours, theirs, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        difference = (a - b).abs().amax(dim=(0, 2)).nan_to_num(nan=float("inf"))  # [S]
        largest, scale = difference.max().item(), b.abs().max().item()
        same = (a.argmax(-1) == b.argmax(-1)).float().mean().item()
        fits = largest <= tolerance * max(1.0, scale)
        log(
            f"{'verified' if fits else 'DIFFERENT'}: {name}: {a[..., 0].numel()} positions, largest difference of "
            f"logits {largest:.2e} (position {int(difference.argmax())}, largest logit {scale:.3g}), "
            f"same next token {same:.1%}"
        )
        if not fits:
            wrong.append((largest, f"by {largest:.2e} ({name}), wanted at most {tolerance:g} of {scale:.3g}"))
    if wrong:
        raise VerificationError(f"logits differ from transformers' {max(wrong)[1]}: nothing was kept")


def make_prompts(model: ModelConfig, texts: Sequence[Sequence[int]] = (), seed: int = 1) -> Prompts:
    """Tokens [B, S] by name: random ones over the whole vocabulary, and real ones.

    Args:
        model: prompts stay within its positions, and cross its window unless that is expensive.
        texts: token ids of real texts.
    """
    limit = model.max_position_embeddings
    window = model.window_size[0] + 1 if model.window_size and model.window_size[0] >= 0 else 0
    length = min(limit, max(RANDOM_LENGTH, window + 16 if window <= CROSSED_WINDOW else 0))
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(0, model.vocab_size, (RANDOM_ROWS, length), generator=generator)
    prompts = {"random tokens": random}
    real = [token for text in texts for token in text if token < model.vocab_size][:length]
    if len(real) > 1:
        prompts["real text"] = torch.tensor([real])
    return prompts


@torch.no_grad()
def our_logits(model: ModelConfig, read: ReadTensor, prompts: Prompts) -> list[torch.Tensor]:
    """Logits [B, S, v] of each prompt, fp32, with one layer in memory at a time.

    Args:
        read: gives a parameter by its global name.
    """
    plain = replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    embedding = load_chunk(plain, (), read, has_lm_head=False)
    states = [embedding(tokens) for tokens in prompts.values()]
    del embedding
    for index in range(model.num_layers):
        layer = load_chunk(plain, (index,), read, has_embedding=False, has_lm_head=False)
        states = [layer(state) for state in states]
    head = load_chunk(plain, (), read, has_embedding=False)
    return [head(state)[..., : model.vocab_size] for state in states]


@torch.no_grad()
def their_logits(folder: Path, architecture: str, prompts: Prompts) -> list[torch.Tensor]:
    """Logits [B, S, v] of each prompt by transformers, which loads the folder as any user would, in fp32.

    Raises:
        ConfigError: when transformers cannot load the folder, or finds tensors missing or left over.
    """
    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, architecture)
    try:
        model, loading = kind.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # noqa: BLE001  transformers raises what its many checks raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"transformers cannot load {folder}: {reason}") from None
    for problem in ("missing_keys", "mismatched_keys"):
        if loading[problem]:
            raise ConfigError(f"transformers loads {folder} with {problem}: {sorted(loading[problem])[:4]}")
    model.eval()
    return [model(tokens, use_cache=False).logits for tokens in prompts.values()]
