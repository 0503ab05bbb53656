"""The conversions: a checkpoint to a Hugging Face folder, and back. Each is verified before it has its name."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import Config, ConfigError
from megatron_lite.config.data import TOKENIZER_FLAGS
from megatron_lite.data.tokenizer import NullTokenizer, Tokenizer
from megatron_lite.hugging_face.checkpoint_model import CheckpointModel
from megatron_lite.hugging_face.family import Family
from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.hugging_face.imported_settings import (
    TOKEN_IDS,
    exported_settings,
    imported_tokenizer_fields,
)
from megatron_lite.hugging_face.model_card import model_card
from megatron_lite.hugging_face.model_config import choose_family, model_config_json
from megatron_lite.hugging_face.output_folder import made_aside
from megatron_lite.hugging_face.shards import write_shards
from megatron_lite.hugging_face.tokenizer_folder import PROBE_TEXTS, check_tokenizer, write_tokenizer
from megatron_lite.hugging_face.verification import verify
from megatron_lite.hugging_face.weights import tensor_maps, their_shape, to_theirs
from megatron_lite.model.gpt import parameter_shapes

Log = Callable[[str], None]
KEPT = ".expert_bias"  # stays fp32 whatever the weights are


@dataclass(frozen=True)
class ExportOptions:
    """How an export is written and verified: tolerance None = no comparison of logits."""

    dtype: torch.dtype = torch.float32
    max_shard_bytes: int = 5 * 10**9
    architecture: str | None = None
    tolerance: float | None = 1e-4


def export_checkpoint(
    source: CheckpointModel, output: Path, tokenizer: Tokenizer | None, options: ExportOptions, log: Log
) -> None:
    """Write a checkpoint as a folder that transformers loads.

    Args:
        tokenizer: None leaves it out.
        log: takes lines for the user.

    Raises:
        ConfigError: for a model or tokenizer without counterpart, or a name that is taken.
        VerificationError: when transformers computes other logits from the result.
    """
    model = source.model
    family = _family(source, options.architecture)
    log(f"{source.path} -> {family.architecture}")
    maps = {entry.theirs: entry for entry in tensor_maps(family, model, source.shapes)}
    shapes = {name: their_shape(entry, source.shapes, model) for name, entry in maps.items()}

    read = functools.lru_cache(maxsize=1)(source.read)  # a tensor of all experts is many of theirs in turn

    def read_theirs(name: str) -> torch.Tensor:
        return to_theirs(maps[name], [read(part) for part in maps[name].ours], model)

    def read_rounded(name: str) -> torch.Tensor:
        """Weights as the exported file has them: then only the conversion can differ, not the rounding."""
        tensor = source.read(name)
        return tensor if name.endswith(KEPT) else tensor.to(options.dtype)

    with made_aside(output, "--output") as folder:
        kept = {name for name, entry in maps.items() if entry.ours[0].endswith(KEPT)}
        total = write_shards(folder, shapes, options.dtype, options.max_shard_bytes, read_theirs, kept)
        num_files = len(list(folder.glob("*.safetensors")))
        log(f"{len(shapes):,} tensors, {total:,} bytes in {num_files} file{'s' if num_files > 1 else ''}")
        _write_settings(folder, output.name, source, family, tokenizer, options.dtype, log)
        texts = _export_tokenizer(folder, tokenizer, source, log)
        if options.tolerance is not None:
            verify(model, read_rounded, folder, family, texts, options.tolerance, log)
    log(f"written: {output}")


def _family(source: CheckpointModel, wanted: str | None) -> Family:
    """The wanted one, else that of the imported model if it still fits, else the first that does."""
    if wanted is None and source.settings:
        with suppress(ConfigError):
            return choose_family(source.model, source.settings["architecture"])
    return choose_family(source.model, wanted)


def _write_settings(
    folder: Path,
    name: str,
    source: CheckpointModel,
    family: Family,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    log: Log,
) -> None:
    named = tokenizer is not None and not isinstance(tokenizer, NullTokenizer)
    special = tokenizer.special_ids | {"eos": tokenizer.eod} if named else {}
    same = source.has_imported_tokenizer(tokenizer)
    beside, generation = exported_settings(source.settings, special, same, log)
    if source.settings and source.settings["architecture"] != family.architecture:
        log(f"only the ids of special tokens are taken from {source.settings['architecture']}'s config.json")
        beside = {key: value for key, value in beside.items() if key in TOKEN_IDS}
    word = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", model_config_json(source.model, family, word, beside))
    _write_json(folder / "generation_config.json", generation)
    parameters = sum(torch.Size(shape).numel() for shape in parameter_shapes(source.model).values())
    card = model_card(name, family.architecture, parameters, word, source.config, source.train_state)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _export_tokenizer(
    folder: Path, tokenizer: Tokenizer | None, source: CheckpointModel, log: Log
) -> Sequence[Sequence[int]]:
    """Write and check the tokenizer; returns the ids of real texts."""
    if tokenizer is None:
        log("no tokenizer in the folder")
        return ()
    same = source.settings if source.has_imported_tokenizer(tokenizer) else None
    fields = imported_tokenizer_fields(same, log)
    if not write_tokenizer(tokenizer, folder, source.model.max_position_embeddings, fields):
        log(f"{tokenizer.name} has no files: no tokenizer in the folder")
        return ()
    count = check_tokenizer(tokenizer, folder)
    log(f"tokenizer {tokenizer.name}: {count:,} ids of {len(PROBE_TEXTS)} texts equal to AutoTokenizer's")
    return tokenizer.encode_batch(PROBE_TEXTS)


def import_folder(
    source: ModelFolder,
    save: Path,
    tokenizer: Tokenizer | None,
    tolerance: float | None,
    log: Log,
) -> None:
    """Write a Hugging Face folder as a checkpoint at step 0 that training starts from.

    Args:
        save: becomes the --save folder with one checkpoint in it.
        tokenizer: the folder's, None when training will bring its own.
        tolerance: None = no comparison of logits.

    Raises:
        ConfigError: for a damaged folder, or a name that is taken.
        VerificationError: when transformers computes other logits from the folder.
    """
    for line in source.log:
        log(f"config.json: {line}")
    config = {"model": Config(model=source.model).to_dict()["model"]}
    fingerprint, files, texts = None, (), ()
    if tokenizer is not None:
        flags = source.tokenizer_flags()
        config["data"] = {name: getattr(flags, name) for name in TOKENIZER_FLAGS}
        fingerprint, files = tokenizer.fingerprint, tokenizer.files()
        texts = tokenizer.encode_batch(PROBE_TEXTS)
    state: dict[str, Any] = {"iteration": 0, "consumed_samples": 0, "weights_only": True}
    state["hugging_face"] = source.settings | {"tokenizer_fingerprint": fingerprint}
    with made_aside(save, "--save") as folder:
        path = Path(write_checkpoint(str(folder), 0, source.our_tensors(), config, state, files))
        if tolerance is not None:
            written = CheckpointModel(str(path))
            verify(source.model, written.read, source.path, source.family, texts, tolerance, log)
            written.reader.close()
    log(f"written: {save / path.name}")
