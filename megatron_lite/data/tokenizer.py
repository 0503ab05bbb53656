"""Text <-> token ids, one class per family of tokenizer, all read from local files.

What holds for every family:
- no bos, no eos is added: the caller appends `eod`, one per document;
- text that spells a special token ("</s>", "<|endoftext|>") stays text: it never becomes that token;
- a lone surrogate, which some libraries replace silently and others die of, is refused;
- `vocab_size` is the true size, the largest id + 1; nothing is padded here.
"""

import hashlib
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
import tokenizers

from megatron_lite.config.data import TOKENIZER_FLAGS, DataConfig
from megatron_lite.config.declare import ConfigError, flag_name
from megatron_lite.config.model import ModelConfig
from megatron_lite.data.tiktoken_file import read_tiktoken
from megatron_lite.data.unicode_text import check_unicode
from megatron_lite.data.words import Ids, WordEncoder, encode_whole, flatten, word_encoder
from megatron_lite.files.command_line import number
from megatron_lite.files.foreign_files import foreign_content, foreign_file
from megatron_lite.files.reading import read_object

# Megatron's two patterns (megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py); v2 is its default.
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
TIKTOKEN_MAX_VOCAB = 2**17

# Where a tokenizer.json stands alone, nothing in it says which token ends a document.
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]")

SPECIAL_NAMES = ("bos", "eos", "unk", "pad")
OTHER_TYPES = {
    "tokenizer.model": "; use --tokenizer-type SentencePieceTokenizer with its tokenizer.model",
    "merges.txt": "; use --tokenizer-type GPT2BPETokenizer with its vocab.json and merges.txt",
}


class Tokenizer:
    """What every family offers.

    Attributes:
        name: the Megatron name of the type and the file it was read from.
        vocab_size: true vocabulary size, largest id + 1.
        eod: id that ends a document.
        special_ids: the ids among bos, eos, unk, pad that this tokenizer has, by these names.
        fingerprint: hash of everything that decides the ids; two tokenizers with one fingerprint agree.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        special_ids: dict[str, int],
        content: Sequence[str | bytes],
        files: Sequence[Path] = (),
    ) -> None:
        self.name, self.vocab_size, self.special_ids = name, vocab_size, special_ids
        self.eod = special_ids["eos"]
        self._files = tuple(files)
        digest = hashlib.sha256()
        for part in content:
            part = part.encode() if isinstance(part, str) else part
            digest.update(len(part).to_bytes(8, "little") + part)
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without bos or eos. Raises ConfigError for a lone surrogate."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, on one core. Raises ConfigError for a lone surrogate."""
        for text in texts:
            check_unicode(text)
        return self._encode_batch(texts)

    def encode_flat(self, texts: Sequence[str]) -> Ids:
        """The same as one array of all ids, int32, and the number of ids of each text, int64."""
        return flatten(self.encode_batch(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` spell."""
        return self._decode([int(number) for number in ids])

    def files(self) -> tuple[Path, ...]:
        """The files that make this tokenizer: what a converter copies."""
        return self._files

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise NotImplementedError

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model file; eod is the model's eos.

    Megatron's SentencePieceTokenizer appends <CLS>, <SEP>, <EOD> and <MASK> to the vocabulary in its legacy form;
    GPTSentencePieceTokenizer and Llama2Tokenizer end documents with the model's eos, and so do all three names here.
    """

    def __init__(self, config: DataConfig, vocab_size: int | None) -> None:
        path = _existing(config, "tokenizer_model", "a SentencePiece .model file")
        content = path.read_bytes()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
            size = self._processor.GetPieceSize()
        except (RuntimeError, OSError):
            size = 0
        if size == 0:
            what = foreign_content(content[:512], binary=True)
            raise ConfigError(f"--tokenizer-model '{path}' is not a SentencePiece model{what}")
        numbers = {name: getattr(self._processor, f"{name}_id")() for name in SPECIAL_NAMES}
        special_ids = {name: number for name, number in numbers.items() if number >= 0}
        if "eos" not in special_ids:
            raise ConfigError(f"--tokenizer-model '{path}' has no end-of-sentence piece to end documents")
        name = f"{config.tokenizer_type} {path.name}"
        super().__init__(name, size, special_ids, ("sentencepiece", content), (path,))

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: the callers run one process per core.
        return self._processor.Encode(list(texts), out_type=int, num_threads=1) if texts else []

    def _decode(self, ids: list[int]) -> str:
        return self._processor.Decode(ids)


class FastTokenizer(Tokenizer):
    """What the `tokenizers` library runs: a tokenizer.json, or GPT-2's vocab.json and merges.txt."""

    def __init__(
        self, name: str, core: tokenizers.Tokenizer, special: dict[str, str], files: Sequence[Path]
    ) -> None:
        """`special` gives the text of the tokens among bos, eos, unk and pad; eos must be there."""
        self.core = core
        vocabulary = core.get_vocab(with_added_tokens=True)
        special_ids = {key: vocabulary[text] for key, text in special.items() if text in vocabulary}
        core.no_padding()
        core.no_truncation()
        core.encode_special_tokens = True  # text that spells a special token stays text
        content = ("tokenizers", core.to_str(), str(sorted(special_ids.items())))
        super().__init__(name, max(vocabulary.values(), default=-1) + 1, special_ids, content, files)

    def encode_flat(self, texts: Sequence[str]) -> Ids:
        if self._words is None:
            return super().encode_flat(texts)
        for text in texts:
            check_unicode(text)
        return self._words.encode(texts)

    @cached_property
    def _words(self) -> WordEncoder | None:
        return word_encoder(self.core)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_whole(self.core, texts)

    def _decode(self, ids: list[int]) -> str:
        return self.core.decode(ids, skip_special_tokens=False)


class TikTokenTokenizer(Tokenizer):
    """Megatron's TikTokenizer: ids 0 .. num_special_tokens-1 are special, the file's tokens follow by rank."""

    def __init__(self, config: DataConfig, vocab_size: int | None) -> None:
        path = _existing(config, "tokenizer_model", "a tiktoken vocabulary file")
        num_special = config.tiktoken_num_special_tokens
        size = vocab_size or TIKTOKEN_MAX_VOCAB
        special = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
        if not 3 <= num_special < size:
            raise ConfigError(
                f"--tiktoken-num-special-tokens is {num_special:,}, wanted at least 3 (unk, bos, eos) and "
                f"less than the vocabulary's {size:,}"
            )
        special = special[:num_special] + [f"<SPECIAL_{i}>" for i in range(len(special), num_special)]
        content = path.read_bytes()
        tokens = read_tiktoken(path, content)[: size - num_special]
        size = len(tokens) + num_special
        if vocab_size is not None and size < vocab_size:
            raise ConfigError(
                f"--vocab-size is {vocab_size:,}, but --tokenizer-model '{path}' has {len(tokens):,} tokens and "
                f"--tiktoken-num-special-tokens adds {num_special:,}"
            )
        pattern = config.tiktoken_pattern or "v2"
        self.num_special, self.pattern = num_special, TIKTOKEN_PATTERNS[pattern]
        self.encoding = tiktoken.Encoding(
            name=path.stem,
            pat_str=self.pattern,
            mergeable_ranks={token: rank + num_special for rank, token in enumerate(tokens)},
            special_tokens={text: number for number, text in enumerate(special)},
        )
        parts = ("tiktoken", content, f"{pattern} {num_special} {size}")
        super().__init__(f"TikTokenizer {path.name}", size, {"unk": 0, "bos": 1, "eos": 2}, parts, (path,))

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encoding.encode_ordinary(text) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)


class NullTokenizer(Tokenizer):
    """No tokenizer: for benchmarks and tests. eod = --vocab-size, so the true size is --vocab-size + 1.

    Text made of whole numbers with single spaces between gives these numbers (Megatron-core up to 0.16); any
    other text gives its code points modulo the size (Megatron-core since).
    """

    def __init__(self, config: DataConfig, vocab_size: int | None) -> None:
        if vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        self._size = vocab_size
        name, content = f"NullTokenizer {vocab_size}", ("null", str(vocab_size))
        super().__init__(name, vocab_size + 1, {"eos": vocab_size}, content)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        words = text.split(" ")
        if not (text.isascii() and all(word.isdigit() for word in words)):
            return [ord(character) % self._size for character in text]
        ids = [int(word) for word in words]
        if max(ids) >= self._size:
            raise ConfigError(f"{max(ids):,} is no token of a NullTokenizer with --vocab-size {self._size:,}")
        return ids

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def build_tokenizer(config: DataConfig, vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer that the flags name.

    Args:
        config: read are tokenizer_type, tokenizer_model, vocab_file, merge_file and the two tiktoken fields.
        vocab_size: --vocab-size: the size of a NullTokenizer, the cut of a TikTokenizer; for the others a floor
            that the true size must not exceed.

    Raises:
        ConfigError: for a missing flag or file, a file that is no such tokenizer, or a vocabulary that does not fit.
    """
    build = BUILDERS.get(config.tokenizer_type or "")
    if build is None:
        raise ConfigError(
            f"--tokenizer-type is {config.tokenizer_type or 'not given'}, wanted one of {', '.join(BUILDERS)}"
        )
    tokenizer = build(config, vocab_size)
    limit = None if config.tokenizer_type == "NullTokenizer" else vocab_size
    if limit is not None and tokenizer.vocab_size > limit:
        raise ConfigError(
            f"--vocab-size is {vocab_size:,}, but the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} tokens"
        )
    return tokenizer


def add_tokenizer_flags(parser: ArgumentParser) -> None:
    """Add the tokenizer's flags to a script's parser, as the configuration declares them."""
    group = parser.add_argument_group("tokenizer")
    declared = {item.name: item for item in (*fields(DataConfig), *fields(ModelConfig))}
    for name in (*TOKENIZER_FLAGS, "vocab_size"):
        item = declared[name]
        whole = isinstance(item.default, int) or name == "vocab_size"
        group.add_argument(
            flag_name(name),
            type=number(item.metadata.get("minimum", 0)) if whole else str,
            default=item.default,
            choices=item.metadata.get("choices"),
            metavar=None if item.metadata.get("choices") else name.rsplit("_", 1)[-1].upper(),
            help=item.metadata["help"],
        )


def tokenizer_config(arguments: Any) -> DataConfig:
    """The DataConfig that a script's parsed tokenizer flags stand for."""
    return DataConfig(**{name: getattr(arguments, name) for name in TOKENIZER_FLAGS})


def given_tokenizer(arguments: Any, vocab_size: int | None) -> Tokenizer | None:
    """The tokenizer that these flags name; None where they name none. Raises ConfigError as build_tokenizer."""
    return build_tokenizer(tokenizer_config(arguments), vocab_size) if arguments.tokenizer_type else None


def _existing(config: DataConfig, name: str, wanted: str, folder: bool = False) -> Path:
    flag, value = flag_name(name), getattr(config, name)
    if not value:
        raise ConfigError(f"--tokenizer-type {config.tokenizer_type} needs {flag}: {wanted}")
    path = Path(value)
    if not (path.is_file() or (folder and path.is_dir())):
        seen = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{flag} '{value}' {seen}, wanted {wanted}")
    return path


def _hugging_face(config: DataConfig, vocab_size: int | None) -> Tokenizer:
    wanted = "a local folder with tokenizer.json, or that file"
    path = _existing(config, "tokenizer_model", wanted, folder=True)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        other = next((hint for name, hint in OTHER_TYPES.items() if (path / name).is_file()), "")
        raise ConfigError(f"--tokenizer-model '{path}' has no tokenizer.json{other}")
    core = _load_fast(file, lambda: tokenizers.Tokenizer.from_file(str(file)), "a tokenizer.json")
    special, settings = _special_texts(file.parent, core), file.parent / "tokenizer_config.json"
    if "eos" not in special:
        raise ConfigError(
            f"--tokenizer-model '{path}' does not say which token ends a text, wanted eos_token in '{settings}'"
        )
    if core.token_to_id(special["eos"]) is None:
        raise ConfigError(f"'{settings}' names eos_token '{special['eos']}', which is no token of '{file}'")
    core.add_special_tokens([special["eos"]])  # so that text never becomes it, even if the file forgot to say
    beside = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "chat_template.jinja")
    files = [file, *(file.parent / name for name in beside if (file.parent / name).is_file())]
    return FastTokenizer(f"HuggingFaceTokenizer {path.name}", core, special, files)


def _special_texts(folder: Path, core: tokenizers.Tokenizer) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_object(folder / name) if (folder / name).is_file() else {}
        for key in SPECIAL_NAMES:
            value = content.get(f"{key}_token")
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[key] = text
    if "eos" not in texts:
        known = [name for name in END_OF_TEXT_NAMES if core.token_to_id(name) is not None]
        if len(known) == 1:
            texts["eos"] = known[0]
    return texts


def _gpt2(config: DataConfig, vocab_size: int | None) -> Tokenizer:
    vocab = _existing(config, "vocab_file", "GPT-2's vocab.json")
    merges = _existing(config, "merge_file", "GPT-2's merges.txt")
    model = _load_fast(
        vocab,
        lambda: tokenizers.models.BPE.from_file(str(vocab), str(merges)),
        f"a vocab.json that fits '{merges}'",
        beside=(merges,),
    )
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    if core.token_to_id("<|endoftext|>") is None:
        raise ConfigError(f"--vocab-file '{vocab}' has no token <|endoftext|>, wanted it to end documents")
    return FastTokenizer(f"GPT2BPETokenizer {vocab.name}", core, {"eos": "<|endoftext|>"}, (vocab, merges))


def _load_fast(path: Path, load: Callable[[], Any], wanted: str, beside: Sequence[Path] = ()) -> Any:
    try:
        return load()
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        for file in beside:
            if what := foreign_file(file):
                raise ConfigError(f"'{file}' cannot be read{what}") from None
        why = foreign_file(path) or f": {first_line}"
        raise ConfigError(f"'{path}' cannot be read as {wanted}{why}") from None


BUILDERS: dict[str, Callable[[DataConfig, int | None], Tokenizer]] = {
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "GPTSentencePieceTokenizer": SentencePieceTokenizer,
    "Llama2Tokenizer": SentencePieceTokenizer,
    "HuggingFaceTokenizer": _hugging_face,
    "GPT2BPETokenizer": _gpt2,
    "TikTokenizer": TikTokenTokenizer,
    "NullTokenizer": NullTokenizer,
}
