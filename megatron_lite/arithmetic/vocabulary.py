"""The vocabulary's true and padded size, and the label that is none of its ids. Imports no torch."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron_lite.config import Config, ConfigError, ModelConfig

# Vocabularies that the tokenizer's type alone tells.
KNOWN_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}


def known_vocabulary(config: Config) -> int | None:
    """The true size of the vocabulary as far as the flags alone tell it; None where the tokenizer's files decide."""
    kind, size = config.data.tokenizer_type, config.model.vocab_size
    if size is not None:
        return size + 1 if kind == "NullTokenizer" else size  # its end of document
    if kind == "GPT2BPETokenizer" and config.data.vocab_file and Path(config.data.vocab_file).is_file():
        with suppress(OSError, ValueError):  # what is wrong with it is said where the tokenizer is built
            return len(json.loads(Path(config.data.vocab_file).read_text(encoding="utf-8")))
    return config.model.padded_vocab_size or KNOWN_VOCABULARIES.get(kind)


def padded_vocabulary(model: ModelConfig, vocab_size: int, tensor_size: int) -> int:
    """The rows of the embedding for a true vocabulary of vocab_size tokens.

    The true size rounded up to a multiple of --make-vocab-size-divisible-by, and on to the next one that the tensor
    ranks share equally (Megatron pads to a multiple of the product). Padded rows never take part in the loss, and a
    checkpoint's rows up to the true size load into any padding.
    """
    if model.padded_vocab_size is not None:
        if model.padded_vocab_size < vocab_size:
            raise ConfigError(
                f"--padded-vocab-size is {model.padded_vocab_size:,}, wanted at least the vocabulary's {vocab_size:,}"
            )
        return model.padded_vocab_size
    multiple = model.make_vocab_size_divisible_by
    rows = -(-vocab_size // multiple) * multiple
    return -(-rows // tensor_size) * tensor_size


def with_vocabulary(config: Config, tokenizer_size: int) -> Config:
    """The config with vocab_size (true) and padded_vocab_size filled in.

    --vocab-size may ask for more rows than the tokenizer has tokens, never for fewer. Raises ConfigError for a
    --padded-vocab-size that is too small; that tensor ranks share it equally is among the checks of the flags.
    """
    vocab_size = max(tokenizer_size, config.model.vocab_size or 0)
    padded = padded_vocabulary(config.model, vocab_size, config.parallel.tensor_model_parallel_size)
    return replace(config, model=replace(config.model, vocab_size=vocab_size, padded_vocab_size=padded))
