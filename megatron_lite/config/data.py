"""The flags of data and tokenizer."""

from dataclasses import dataclass

from megatron_lite.config.declare import Words, flag

# The fields that say which tokenizer it is; three name files.
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
TOKENIZER_FLAGS = ("tokenizer_type", *TOKENIZER_FILES, "tiktoken_pattern", "tiktoken_num_special_tokens")
IGNORED_LABEL = -100  # a label without loss; torch's cross entropy ignores it too


@dataclass(frozen=True)
class DataConfig:
    """Data and tokenizer."""

    seq_length: int | None = flag(None, "tokens of a sample", aliases=("--encoder-seq-length",), minimum=1)
    data_path: Words | None = flag(None, "PREFIX ..., or WEIGHT PREFIX ...", nargs="*")
    train_data_path: Words | None = flag(None, "as --data-path, for training only", nargs="*")
    valid_data_path: Words | None = flag(None, "as --data-path, for validation only", nargs="*")
    test_data_path: Words | None = flag(None, "as --data-path, for the test only", nargs="*")
    split: str | None = flag(None, "weights of train,valid,test; default 969,30,1", nargs="+", join=True)
    data_args_path: str | None = flag(None, "file with the words of --data-path, separated by white space")
    per_split_data_args_path: str | None = flag(None, "JSON file {train: [...], valid: [...], test: [...]}")
    data_cache_path: str | None = flag(None, "folder to cache index arrays in")
    per_dataset_sequences_path: str | None = flag(None, "JSON file {prefix: [sequences, documents]}")
    mock_data: bool = flag(False, "synthetic samples instead of files")
    num_workers: int = flag(2, "data loader threads per rank; 0 = nothing is read ahead", minimum=0)
    dataloader_type: str | None = flag(None, "order of samples; default single", choices=("single", "cyclic"))
    dataloader_fast_cache_load: bool = flag(False, "trust cached index arrays, skip the scan")
    dataloader_defer_npy_index_mmap: bool = flag(False, "map cached index arrays on first use")
    no_mmap_bin_files: bool = flag(False, "read .bin files instead of mapping them")
    reset_position_ids: bool = flag(False, "positions restart after each end of document")
    reset_attention_mask: bool = flag(False, "attention stops at each end of document")
    eod_mask_loss: bool = flag(False, "no loss where the input is end of document")
    allow_data_change: bool = flag(False, "ours: a resumed run may change data, seed or sequence length")
    tokenizer_type: str | None = flag(
        None,
        "kind of tokenizer",
        choices=(
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "NullTokenizer",
        ),
        synonyms={
            "Llama3Tokenizer": "HuggingFaceTokenizer",
            "MistralTokenizer": "HuggingFaceTokenizer",
            "HFTokenizer": "HuggingFaceTokenizer",
            "PretrainedFromHF": "HuggingFaceTokenizer",
            # the words of --tokenizer-library
            "huggingface": "HuggingFaceTokenizer",
            "sentencepiece": "GPTSentencePieceTokenizer",
            "tiktoken": "TikTokenizer",
            "megatron": "GPT2BPETokenizer",
            "null": "NullTokenizer",
            "null-text": "NullTokenizer",
        },
    )
    tokenizer_model: str | None = flag(None, "file or folder of the tokenizer")
    vocab_file: str | None = flag(None, "GPT-2 vocab.json")
    merge_file: str | None = flag(None, "GPT-2 merges.txt")
    tiktoken_pattern: str | None = flag(None, "pattern of TikTokenizer", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = flag(1000, "number of special tokens of TikTokenizer", minimum=0)
    tokenizer_metadata: str | None = flag(None, "", no_effect="the tokenizer files say all that is needed")
