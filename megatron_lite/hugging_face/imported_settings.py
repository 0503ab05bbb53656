"""What a Hugging Face folder holds beside the model's maths: stored in checkpoints, written again on export.

Ends of text (one id or several), fields of config.json that have no flag here, generation_config.json, and of a
tokenizer that is not copied as files what its tokenizer_config.json holds of its use. Imports no torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_lite.files.reading import read_object
from megatron_lite.hugging_face.family import Family
from megatron_lite.hugging_face.fields import config_class

Settings = dict[str, Any]
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Said anew by every export: what it is, who wrote it, in which format; and names of values that the model's flags give.
REPLACED = {"architectures", "model_type", "torch_dtype", "dtype", "transformers_version"}
REPLACED |= {"num_nextn_predict_layers", "num_mtp_layers"}  # whose weights are not here
REPLACED |= {"rope_theta", "rope_scaling", "rope_parameters"}
REPLACED |= {"hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers"}
# Of tokenizer_config.json: what does not depend on the class of the tokenizer.
TOKENIZER_FIELDS = ("chat_template", "model_max_length", "padding_side", "truncation_side")


def read_imported_settings(folder: Path, content: Mapping[str, Any], family: Family) -> Settings:
    """The settings of a folder.

    Args:
        content: its config.json.

    Raises:
        ConfigError: generation_config.json or tokenizer_config.json is no JSON object.
    """
    config = {name: value for name, value in content.items() if name not in REPLACED}
    # What is silent there transformers takes from the class: written down, another class cannot take other ids.
    defaults = config_class(family.model_type).defaults
    config |= {name: content.get(name, defaults.get(name)) for name in TOKEN_IDS}
    settings: Settings = {"architecture": family.architecture, "config": config}
    if (folder / "generation_config.json").is_file():
        settings["generation_config"] = read_object(folder / "generation_config.json")
    if not (folder / "tokenizer.json").is_file() and (folder / "tokenizer_config.json").is_file():
        settings["tokenizer_config"] = read_object(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        if template.is_file():
            settings["tokenizer_config"]["chat_template"] = template.read_text(encoding="utf-8")
    return settings


def end_ids(settings: Settings | None) -> set[int]:
    """The ids that end a text by the imported settings."""
    found: set[int] = set()
    for part in ("config", "generation_config"):
        value = ((settings or {}).get(part) or {}).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found |= {number for number in values if isinstance(number, int)}
    return found


def exported_settings(
    settings: Settings | None, own: Mapping[str, int], same_tokenizer: bool, log: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields for config.json, generation_config.json) of an export; lines for what is left out.

    Args:
        settings: of the imported model; None for one that was trained from the start.
        own: {"bos": id, "eos": id, "pad": id} of the tokenizer that is exported, those that it has.
        same_tokenizer: it is the imported model's, or there is none that names an end: the ids stay as they came.
    """
    ids = {name: own.get(name.removesuffix("_token_id")) for name in TOKEN_IDS}
    config = dict((settings or {}).get("config") or {})
    generation = dict((settings or {}).get("generation_config") or {})
    if not settings or not same_tokenizer:
        lost = {name: config[name] for name in TOKEN_IDS if config.get(name) not in (None, ids[name])}
        if lost:
            was = ", ".join(f"{name} {value}" for name, value in lost.items())
            log(f"another tokenizer than the imported model's: its {was} are left out")
        config |= ids
        generation = {name: value for name, value in generation.items() if name not in TOKEN_IDS}
        generation |= {name: value for name, value in ids.items() if value is not None}
    elif "generation_config" not in settings:
        generation = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    if config["eos_token_id"] is None and "eos_token_id" not in generation:
        log("no token ends a text: eos_token_id is left out")
    return config, generation


def imported_tokenizer_fields(settings: Settings | None, log: Callable[[str], None]) -> dict[str, Any]:
    """What of an imported tokenizer_config.json is written again, a line for the rest."""
    stored = (settings or {}).get("tokenizer_config") or {}
    left = sorted(name for name in stored if name not in TOKENIZER_FIELDS and stored[name] is not None)
    if left:
        log(f"tokenizer_config.json is written anew, without the imported {', '.join(left)}")
    return {name: stored[name] for name in TOKENIZER_FIELDS if name in stored}
