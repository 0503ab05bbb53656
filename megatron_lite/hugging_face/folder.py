"""A Hugging Face model folder on disk: its config.json and its tensors, one at a time.

Nothing in it is trusted: safetensors are read as plain bytes, .bin files by torch's restricted unpickler
(weights_only), and no code of the folder is run.
"""

import itertools
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_lite.config.data import DataConfig
from megatron_lite.config.declare import ConfigError
from megatron_lite.data.tokenizer import Tokenizer, build_tokenizer
from megatron_lite.files.foreign_files import foreign_file
from megatron_lite.files.reading import read_object
from megatron_lite.hugging_face.imported_settings import end_ids, read_imported_settings
from megatron_lite.hugging_face.model_config import read_model_config
from megatron_lite.hugging_face.weights import HEAD_WEIGHT, tensor_maps, to_ours
from megatron_lite.model.gpt import GPTChunk, load_chunk, stored_shapes

INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_NAMES = ("model.safetensors", "pytorch_model.bin")
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Tables that old files carry beside the weights; they follow from the configuration.
TABLES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
FUSED = ".experts.gate_up_proj"  # all experts of a layer are one tensor
PREDICTING = ("num_nextn_predict_layers", "num_mtp_layers")
LAYER = re.compile(r"model\.layers\.(\d+)\.")


class ModelFolder:
    """config.json and weights of one model.

    Attributes:
        model, family: read from config.json.
        log: one line per value taken.
        settings: what else is in it, for an export to write again.
    """

    def __init__(self, path: Path, vocabulary_multiple: int = 128) -> None:
        """Read config.json and the weights' headers.

        Raises:
            ConfigError: for anything that is not a whole model of a known family.
        """
        if not path.is_dir():
            raise ConfigError(f"--hf-model '{path}' is not a folder")
        self.path = path
        config = path / "config.json"
        content = read_object(config)
        self.model, self.family, self.log = read_model_config(content, str(config), vocabulary_multiple)
        self.settings = read_imported_settings(path, content, self.family)
        self._predicting_layers = max(content.get(name) or 0 for name in PREDICTING)
        self._files = _weight_files(path)
        self._open: dict[str, Any] = {}
        if self.model.num_layers > len(self._files):
            raise ConfigError(
                f"{path} has {len(self._files):,} tensors, too few for {self.model.num_layers:,} layers"
            )
        # Bare models (GPT-2's own files) leave out the prefix that the class with a head adds.
        prefix = self.family.weights[0].theirs.split(".")[0] + "."
        self._prefix = "" if any(name.startswith(prefix) for name in self._files) else prefix
        self._shapes = stored_shapes(self.model)
        fused = any(name.endswith(FUSED) for name in self._files)
        self.maps = tensor_maps(self.family, self.model, self._shapes, fused)
        self._check_names()

    def read(self, name: str) -> torch.Tensor:
        """One tensor under its full name, in the dtype of the file.

        Raises:
            ConfigError: for a damaged file.
        """
        stored = name.removeprefix(self._prefix)
        source = self._opened(self._files[stored])
        if isinstance(source, dict):
            return source[stored]
        try:
            return source.get_tensor(stored)
        except SafetensorError as error:
            raise ConfigError(f"{self._files[stored]}: {stored} cannot be read: {error}") from None

    def our_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(global name, tensor) of the whole model, in fp32 as training keeps them. Raises as read does."""
        for names, entries in itertools.groupby(self.maps, lambda entry: entry.ours):
            parts = [
                to_ours(entry, self._checked(entry.theirs), self._shapes, self.model) for entry in entries
            ]
            for number, name in enumerate(names):
                tensors = [part[number][1] for part in parts]  # of an experts' tensor one for each expert
                whole = tensors[0] if tensors[0].shape == self._shapes[name] else torch.stack(tensors)
                yield name, whole.float()

    def load(self, dtype: torch.dtype, device: str) -> GPTChunk:
        """The whole model. Raises as read does."""
        tensors = dict(self.our_tensors())
        return load_chunk(self.model, range(self.model.num_layers), tensors.__getitem__, dtype, device)

    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer, None when it has none that is known."""
        flags = self.tokenizer_flags()
        return build_tokenizer(flags, self.model.vocab_size) if flags is not None else None

    def end_ids(self, tokenizer: Tokenizer | None) -> set[int]:
        """The ids that end a text, by the folder and by a tokenizer."""
        return end_ids(self.settings) | ({tokenizer.eod} if tokenizer is not None else set())

    def tokenizer_flags(self) -> DataConfig | None:
        """The flags that read the folder's tokenizer; None when it has none that is known.

        tokenizer.json comes first: it is what transformers itself reads.
        """
        folder = self.path.absolute()
        model, vocabulary, merges = (
            folder / name for name in ("tokenizer.model", "vocab.json", "merges.txt")
        )
        if (folder / "tokenizer.json").is_file():
            return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
        if model.is_file():
            return DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(model))
        if vocabulary.is_file() and merges.is_file():
            return DataConfig(
                tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocabulary), merge_file=str(merges)
            )
        return None

    def _checked(self, name: str) -> torch.Tensor:
        tensor = self.read(name)
        if tensor.dtype not in WEIGHT_DTYPES:
            wanted = ", ".join(map(str, WEIGHT_DTYPES))
            raise ConfigError(f"{self.path}: {name} is {tensor.dtype}, wanted one of {wanted}")
        if not tensor.isfinite().all():
            count = (~tensor.isfinite()).sum().item()
            raise ConfigError(f"{self.path}: {name} has {count:,} values that are not finite")
        return tensor

    def _predicts_more(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the model's, which transformers passes over as well."""
        layer, first = LAYER.match(name), self.model.num_layers
        return layer is not None and first <= int(layer[1]) < first + self._predicting_layers

    def _opened(self, file: Path) -> Any:
        """The open file; only one is kept open, the tensors come in order."""
        key = str(file)
        if key not in self._open:
            self._open = {key: _open_weights(file)}
        return self._open[key]

    def _check_names(self) -> None:
        expected = {entry.theirs.removeprefix(self._prefix) for entry in self.maps}
        missing = sorted(expected - set(self._files))
        if missing:
            raise ConfigError(
                f"{self.path} lacks {len(missing):,} tensors of the model, the first is {missing[0]}"
            )
        extra = [name for name in self._files if name not in expected and not name.endswith(TABLES)]
        predicting = [name for name in extra if self._predicts_more(name)]
        if predicting:
            self.log.append(f"{len(predicting):,} tensors of multi-token prediction are left out")
            extra = [name for name in extra if name not in predicting]
        if HEAD_WEIGHT in extra and not self.model.untie_embeddings_and_output_weights:
            embedding = self.maps[0].theirs
            if not torch.equal(self.read(HEAD_WEIGHT), self.read(embedding)):
                raise ConfigError(
                    f"{self.path}: config.json ties the head to the embedding, but {HEAD_WEIGHT} and {embedding} differ"
                )
            extra.remove(HEAD_WEIGHT)
        if extra:
            raise ConfigError(
                f"{self.path} has {len(extra):,} tensors that the model of its config.json has not, "
                f"the first is {sorted(extra)[0]}"
            )


def _weight_files(path: Path) -> dict[str, Path]:
    """{stored tensor name: file that holds it}."""
    for index in INDEX_NAMES:
        if (path / index).is_file():
            return _indexed_files(path, path / index)
    for name in SINGLE_NAMES:
        if (path / name).is_file():
            return dict.fromkeys(_open_weights(path / name).keys(), path / name)
    raise ConfigError(f"{path} holds no weights, wanted {' or '.join((*SINGLE_NAMES, *INDEX_NAMES))}")


def _indexed_files(path: Path, index: Path) -> dict[str, Path]:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ConfigError(f"{index} has no weight_map of tensor names to file names")
    for file in set(places.values()):
        if Path(file).name != file:
            raise ConfigError(f"{index} names the file '{file}', wanted one in the same folder")
        if not (path / file).is_file():
            raise ConfigError(f"{index} names {file}, which does not exist")
        named = {name for name, other in places.items() if other == file}
        absent = named.difference(_open_weights(path / file).keys())
        if absent:
            raise ConfigError(f"{index} looks for {sorted(absent)[0]} in {file}, which does not hold it")
    return {name: path / file for name, file in places.items()}


def _open_weights(file: Path) -> Any:
    """A safetensors file (tensors come when asked for) or a dict of tensors, memory-mapped where the format can."""
    if file.suffix == ".safetensors":
        try:
            return safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            what = foreign_file(file, binary=True) or f": {error}"
            raise ConfigError(f"{file} is not a whole safetensors file{what}") from None
    is_zip = zipfile.is_zipfile(file)  # the format of torch >= 1.6, the only one that can be memory-mapped
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = "" if is_zip else foreign_file(file, binary=True)
        raise ConfigError(
            f"{file} is not a file of plain tensors (read with weights_only){what or f': {reason}'}"
        ) from None
    if not isinstance(content, dict) or not all(isinstance(v, torch.Tensor) for v in content.values()):
        raise ConfigError(f"{file} does not hold a dict of tensors")
    return content
