"""The two conversions, whole: a checkpoint to a Hugging Face folder, and back. Each proves itself before it counts."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import Config, ConfigError, DataConfig
from megatron_lite.data.tokenizer import NullTokenizer, Tokenizer
from megatron_lite.files.command_line import RunError
from megatron_lite.hugging_face.checkpoint_model import CheckpointModel
from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.hugging_face.imported_settings import (
    TOKEN_IDS,
    exported_settings,
    imported_tokenizer_fields,
)
from megatron_lite.hugging_face.model_card import model_card
from megatron_lite.hugging_face.model_config_json import (
    choose_architecture,
    model_config_json,
)
from megatron_lite.hugging_face.output_folder import made_aside
from megatron_lite.hugging_face.shards import write_shards
from megatron_lite.hugging_face.tokenizer_folder import PROBE_TEXTS, check_tokenizer, write_tokenizer
from megatron_lite.hugging_face.verification import compare, make_prompts, our_logits, their_logits
from megatron_lite.hugging_face.weights import tensor_maps, their_shape, to_theirs

Say = Callable[[str], None]


class VerificationError(RunError):
    """Both sides computed something else: the conversion is wrong, nothing was kept."""


@dataclass(frozen=True)
class ExportOptions:
    """What an export may be told: tolerance None = no comparison of logits."""

    dtype: torch.dtype = torch.float32
    max_shard_bytes: int = 5 * 10**9
    architecture: str | None = None
    tolerance: float | None = 1e-4


def export_checkpoint(
    source: CheckpointModel, output: Path, tokenizer: Tokenizer | None, options: ExportOptions, say: Say
) -> None:
    """Write a checkpoint as a folder that transformers loads.

    Args:
        tokenizer: None leaves it out.
        say: takes lines for the user.

    Raises:
        ConfigError: for a model or tokenizer without counterpart, or a name that is taken.
        VerificationError: when transformers computes other logits from the result.
    """
    model = source.config.model
    architecture = _architecture(source, options.architecture)
    say(f"{source.path} -> {architecture}")
    maps = {entry.theirs: entry for entry in tensor_maps(architecture, model)}
    shapes = {name: their_shape(entry, source.shapes, model) for name, entry in maps.items()}

    def read(name: str) -> torch.Tensor:
        return to_theirs(maps[name], [source.read(part) for part in maps[name].ours], model)

    with made_aside(output, "--output") as folder:
        total = write_shards(folder, shapes, options.dtype, options.max_shard_bytes, read)
        num_files = len(list(folder.glob("*.safetensors")))
        say(f"{len(shapes):,} tensors, {total:,} bytes in {num_files} file{'s' if num_files > 1 else ''}")
        _write_settings(folder, output.name, source, architecture, tokenizer, options.dtype, say)
        texts = _export_tokenizer(folder, tokenizer, source, say)
        if options.tolerance is not None:
            read_rounded = _rounded(source.read, options.dtype)
            prompts = make_prompts(model, texts)
            ours = our_logits(model, read_rounded, prompts)
            _check_logits(
                compare(prompts, ours, their_logits(folder, architecture, prompts)), options.tolerance, say
            )
    say(f"written: {output}")


def _rounded(read: Callable[[str], torch.Tensor], dtype: torch.dtype) -> Callable[[str], torch.Tensor]:
    """Weights as they come out of the exported file: then only the conversion can differ, not the rounding."""
    return lambda name: read(name).to(dtype)


def _architecture(source: CheckpointModel, wanted: str | None) -> str:
    """The wanted one, else that of the imported model if it still fits, else the first that does."""
    if wanted is None and source.settings:
        with suppress(ConfigError):
            return choose_architecture(source.config.model, source.settings["architecture"])
    return choose_architecture(source.config.model, wanted)


def _write_settings(
    folder: Path,
    name: str,
    source: CheckpointModel,
    architecture: str,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    say: Say,
) -> None:
    named = tokenizer is not None and not isinstance(tokenizer, NullTokenizer)
    special = tokenizer.special_ids | {"eos": tokenizer.eod} if named else {}
    same = source.has_imported_tokenizer(tokenizer)
    beside, generation = exported_settings(source.settings, special, same, say)
    if source.settings and source.settings["architecture"] != architecture:
        say(f"only the ids of special tokens are kept of {source.settings['architecture']}'s config.json")
        beside = {key: value for key, value in beside.items() if key in TOKEN_IDS}
    word = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", model_config_json(source.config.model, architecture, word, beside))
    _write_json(folder / "generation_config.json", generation)
    parameters = sum(torch.Size(shape).numel() for shape in source.shapes.values())
    card = model_card(name, architecture, parameters, word, source.config, source.train_state)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _export_tokenizer(
    folder: Path, tokenizer: Tokenizer | None, source: CheckpointModel, say: Say
) -> Sequence[Sequence[int]]:
    """Write and check the tokenizer; returns the ids of real texts."""
    if tokenizer is None:
        say("no tokenizer in the folder")
        return ()
    same = source.settings if source.has_imported_tokenizer(tokenizer) else None
    fields = imported_tokenizer_fields(same, say)
    if not write_tokenizer(tokenizer, folder, source.config.model.max_position_embeddings, fields):
        say(f"{tokenizer.name} has no files: no tokenizer in the folder")
        return ()
    count = check_tokenizer(tokenizer, folder)
    say(f"tokenizer {tokenizer.name}: {count:,} ids of {len(PROBE_TEXTS)} texts equal to AutoTokenizer's")
    return tokenizer.encode_batch(PROBE_TEXTS)


def _check_logits(results: Sequence[Any], tolerance: float, say: Say) -> None:
    for result in results:
        say(f"verified: {result}" if result.within(tolerance) else f"DIFFERENT: {result}")
    wrong = [result for result in results if not result.within(tolerance)]
    if wrong:
        worst = max(wrong, key=lambda result: result.largest)
        raise VerificationError(
            f"logits differ from transformers' by {worst.largest:.2e} ({worst.name}), wanted at most {tolerance:g} "
            f"of the largest logit {worst.scale:.3g}: nothing was kept"
        )


def import_folder(
    source: ModelFolder,
    save: Path,
    tokenizer_flags: DataConfig,
    tokenizer: Tokenizer | None,
    tolerance: float | None,
    say: Say,
) -> str:
    """Write a Hugging Face folder as a checkpoint at step 0 that training starts from; returns its path.

    Args:
        save: becomes the --save folder with one checkpoint in it.
        tokenizer_flags, tokenizer: what the folder holds, None when training will bring its own.
        tolerance: None = no comparison of logits.

    Raises:
        ConfigError: for a damaged folder, or a name that is taken.
        VerificationError: when transformers computes other logits from the folder.
    """
    for line in source.log:
        say(f"config.json: {line}")
    config = {"model": Config(model=source.model).to_dict()["model"]}
    if tokenizer is not None:
        kept = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
        config["data"] = {name: getattr(tokenizer_flags, name) for name in kept}
    state: dict[str, Any] = {"iteration": 0, "consumed_samples": 0, "weights_only": True}
    fingerprint = tokenizer.fingerprint if tokenizer is not None else None
    state["hugging_face"] = source.settings | {"tokenizer_fingerprint": fingerprint}
    files = tokenizer.files() if tokenizer is not None else ()
    with made_aside(save, "--save") as folder:
        path = Path(write_checkpoint(str(folder), 0, source.our_tensors(), config, state, files))
        if tolerance is not None:
            written = CheckpointModel(str(path))
            texts = tokenizer.encode_batch(PROBE_TEXTS) if tokenizer is not None else ()
            prompts = make_prompts(source.model, texts)
            ours = our_logits(source.model, written.read, prompts)
            written.reader.close()
            theirs = their_logits(source.path, source.family.architecture, prompts)
            _check_logits(compare(prompts, ours, theirs), tolerance, say)
    say(f"written: {save / path.name}")
    return str(save / path.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
