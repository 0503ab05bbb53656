"""The model that a checkpoint holds, whatever layout wrote it: flags, weights by global name, tokenizer."""

from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint import find_in
from megatron_lite.checkpoint.reading import CheckpointReader
from megatron_lite.config import Config, ConfigError
from megatron_lite.data.stored_tokenizer import stored_tokenizer_flags
from megatron_lite.data.tokenizer import NullTokenizer, Tokenizer, build_tokenizer
from megatron_lite.hugging_face.imported_settings import end_ids
from megatron_lite.model.gpt import GPTChunk, load_chunk, stored_shapes


class CheckpointModel:
    """One checkpoint opened for reading.

    Attributes:
        config, model: the run's configuration and its model's.
        train_state: iteration, consumed samples and so on.
        shapes: {global name: shape} of the weights.
        settings: of the Hugging Face model that training began from (imported_settings), None without one.
    """

    def __init__(self, load: str, step: int | None = None) -> None:
        """Open the checkpoint that --load and --ckpt-step name.

        Raises:
            ConfigError: when there is none, or it does not hold the whole model that its configuration describes.
        """
        stored = find_in(load, step)
        if stored is None:
            raise ConfigError(f"--load {load}: there is no checkpoint")
        self.reader = CheckpointReader(stored)
        self.path = self.reader.path
        self.config = Config.from_dict(self.reader.config)
        self.train_state = self.reader.train_state
        self.model = self.config.model
        if self.model.vocab_size is None or self.model.padded_vocab_size is None:
            raise ConfigError(f"{self.path} does not hold the size of its vocabulary")
        settings = self.train_state.get("hugging_face")
        self.settings: dict[str, Any] | None = settings if isinstance(settings, dict) else None
        self.shapes = stored_shapes(self.model)
        self._check()

    def read(self, name: str) -> torch.Tensor:
        """A weight by its global name."""
        return self.reader.read(name)

    def load(self, dtype: torch.dtype, device: str) -> GPTChunk:
        """The whole model."""
        return load_chunk(self.model, range(self.model.num_layers), self.read, dtype, device)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the checkpoint; None when its configuration names none.

        Raises:
            ConfigError: when its files are not there or its vocabulary is larger than the model's.
        """
        data, size = self.config.data, self.model.vocab_size
        if data.tokenizer_type is None:
            return None
        flags = stored_tokenizer_flags(data, Path(self.path) / "tokenizer")
        # A NullTokenizer takes the size without its end of document.
        return build_tokenizer(flags, size - 1 if data.tokenizer_type == "NullTokenizer" else size)

    def has_imported_tokenizer(self, tokenizer: Tokenizer | None) -> bool:
        """Whether this is the imported model's tokenizer, or none that could name other ends of text."""
        if tokenizer is None or isinstance(tokenizer, NullTokenizer):
            return True
        return (self.settings or {}).get("tokenizer_fingerprint") == tokenizer.fingerprint

    def end_ids(self, tokenizer: Tokenizer | None) -> set[int]:
        """The ids that end a text, by the imported model (if the tokenizer is its own) and by a tokenizer."""
        imported = end_ids(self.settings) if self.has_imported_tokenizer(tokenizer) else set()
        return imported | ({tokenizer.eod} if tokenizer is not None else set())

    def _check(self) -> None:
        stored = self.reader.names()
        missing = [name for name in self.shapes if name not in stored]
        if missing:
            raise ConfigError(
                f"{self.path} lacks {len(missing):,} weights of its model, the first is {missing[0]}"
            )
        for name, shape in self.shapes.items():
            if (actual := tuple(stored[name].shape)) != shape:
                raise ConfigError(
                    f"{self.path}: {name} has shape {list(actual)}, by its configuration it is {list(shape)}"
                )
