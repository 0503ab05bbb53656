"""A reader of config.json: every value taken is remembered and told, every field left is looked at. No torch."""

import json
from pathlib import Path
from typing import Any

from megatron_lite.config import ConfigError
from megatron_lite.files.foreign_files import foreign_file
from megatron_lite.hugging_face.families import MATHS_FIELDS, Family

# Written by transformers, read by nobody's forward pass: not worth a line in the log.
SILENT = frozenset(
    (
        "_name_or_path",
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "id2label",
        "label2id",
        "task_specific_params",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "n_ctx",
        "pretraining_tp",
        "problem_type",
        "is_decoder",
        "tokenizer_class",
        "chunk_size_feed_forward",
        "reorder_and_upcast_attn",
        "_attn_implementation_internal",
    )
)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: when there is no such file or something else is in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON{foreign_file(path) or f': {error}'}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, wanted a JSON object")
    return content


class ConfigFields:
    """The fields of one config.json.

    `log` holds one line per value taken; `refused` what must not be ignored, reported together by `finish`.
    """

    def __init__(self, content: dict[str, Any], family: Family, where: str) -> None:
        self.content, self.family, self.where = dict(content), family, where
        self.log: list[str] = []
        self.refused: list[str] = []
        self._taken: set[str] = set()

    def take(self, name: str, kind: type) -> Any:
        """The value of a field, else what transformers assumes; None where that may be.

        Raises:
            ConfigError: for a field that is needed and missing, or of another type.
        """
        self._taken.add(name)
        defaults = self.family.defaults
        if name not in self.content:
            if name not in defaults:
                raise ConfigError(f"{self.where} has no {name}, which {self.family.architecture} needs")
            self.log.append(f"{name} = {defaults[name]} (not in the file: what transformers assumes)")
            return defaults[name]
        value = self.content[name]
        if value is None and name in defaults:
            self.log.append(f"{name} = None")
            return None
        self._check_kind(name, value, kind)
        self.log.append(f"{name} = {value}")
        return float(value) if kind is float else value

    def _check_kind(self, name: str, value: Any, kind: type) -> None:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = {int: numeric and isinstance(value, int), float: numeric}.get(kind, isinstance(value, kind))
        if not fits:
            raise ConfigError(f"{self.where}: {name} is {value!r}, wanted {_WANTED[kind]}")
        if kind is int and value < 1:
            raise ConfigError(f"{self.where}: {name} is {value:,}, wanted at least 1")

    def join(self, name: str, alias: str) -> None:
        """Two names of one value: either may be there.

        Raises:
            ConfigError: both are, with other values.
        """
        self.mark(alias)
        if (
            alias in self.content
            and self.content.setdefault(name, self.content[alias]) != self.content[alias]
        ):
            raise ConfigError(
                f"{self.where} contradicts itself: {name} is {self.content[name]}, {alias} is {self.content[alias]}"
            )

    def mark(self, *names: str) -> None:
        """Fields that were read in another way."""
        self._taken.update(names)

    def refuse(self, what: str) -> None:
        """Remember what cannot be held."""
        self.refused.append(what)

    def finish(self) -> None:
        """Look at the fields that nobody read.

        Raises:
            ConfigError: naming every field that changes the maths and has no counterpart here.
        """
        left = {k: v for k, v in self.content.items() if k not in self._taken and k not in SILENT}
        for name, value in left.items():
            if name in MATHS_FIELDS and value is not None and not _changes_nothing(name, value):
                self.refuse(f"{name} = {json.dumps(value)}")
        if self.refused:
            raise ConfigError(
                f"{self.where}: {self.family.architecture} with {' and '.join(self.refused)} "
                f"computes something this model cannot"
            )
        for name, value in left.items():
            self.log.append(
                f"{name} = {json.dumps(value)} {'changes nothing' if name in MATHS_FIELDS else 'ignored'}"
            )


def _changes_nothing(name: str, value: Any) -> bool:
    if name == "layer_types":
        return isinstance(value, list) and all(kind == "full_attention" for kind in value)
    return value in MATHS_FIELDS[name]


_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", list: "a list"}
