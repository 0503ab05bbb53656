"""The tokenizer of a Hugging Face model folder, as this project's tokenizer flags."""

from pathlib import Path

from megatron_lite.config import DataConfig


def folder_tokenizer_flags(folder: Path) -> DataConfig | None:
    """The flags that read the folder's tokenizer; None when it has none that is known.

    tokenizer.json comes first: it is what transformers itself reads.
    """
    folder = folder.absolute()
    if (folder / "tokenizer.json").is_file():
        return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if (folder / "tokenizer.model").is_file():
        return DataConfig(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(folder / "tokenizer.model")
        )
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return DataConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
        )
    return None
