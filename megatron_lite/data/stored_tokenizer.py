"""The tokenizer that a checkpoint keeps beside its weights: the flags of the run, the files of the checkpoint."""

from dataclasses import replace
from pathlib import Path

from megatron_lite.config.data import TOKENIZER_FILES, DataConfig
from megatron_lite.config.declare import ConfigError, flag_name

# The file that stands for the whole tokenizer where --tokenizer-model may also name a folder.
FOLDER_MARK = "tokenizer.json"


def stored_tokenizer_flags(data: DataConfig, folder: Path) -> DataConfig:
    """The run's tokenizer flags with every file replaced by the copy in `folder`.

    Args:
        data: the run's flags; paths in them may be of another machine.
        folder: CHECKPOINT/tokenizer.

    Raises:
        ConfigError: when the run had files that the folder lacks.
    """
    if data.tokenizer_type in (None, "NullTokenizer"):
        return data
    copies = {}
    for name in TOKENIZER_FILES:
        named = getattr(data, name)
        if named is None:
            continue
        copy = folder / Path(named).name
        whole = folder / FOLDER_MARK
        if copy.is_file():
            copies[name] = str(copy)
        elif name == "tokenizer_model" and data.tokenizer_type == "HuggingFaceTokenizer" and whole.is_file():
            copies[name] = str(folder)
        else:
            raise ConfigError(f"{folder} lacks the copy of {flag_name(name)} {named}, the run's tokenizer")
    return replace(data, **copies)
