"""From flags to datasets: open the sources, build or read the index arrays, check, and log what there is."""

import errno
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.arithmetic.batch_size import BatchSchedule
from megatron_lite.config import Config, ConfigError
from megatron_lite.data.blended_dataset import BlendedDataset, build_blend
from megatron_lite.data.blends import (
    DEFAULT_SPLIT,
    SPLITS,
    Blend,
    DataPlan,
    check_trains,
    plan_data,
    split_range,
)
from megatron_lite.data.gpt_dataset import (
    EmptyPartError,
    GPTDataset,
    Part,
    TokenSource,
    build_entry,
    check_token_ids,
)
from megatron_lite.data.index_cache import IndexCache, IndexEntry
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.mock_dataset import MockSource
from megatron_lite.data.samples import SampleOptions, Samples
from megatron_lite.data.tokenizer import Tokenizer
from megatron_lite.files.reading import read_object

# A source of a blend is asked for this part more than its share, as in Megatron-core: rounding on the way must
# not leave it one sample short.
MID_LEVEL_SURPLUS = 0.005

Say = Callable[[str], None]
Counts = dict[str, int | None]


@dataclass(frozen=True)
class Datasets:
    """train is None when no training sample was asked for; valid and test: name -> dataset, empty when off."""

    train: Samples | None
    valid: dict[str, Samples] = field(default_factory=dict)
    test: dict[str, Samples] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str | None:
        """Equal for two runs that read the same training samples in the same order."""
        return self.train.fingerprint if self.train is not None else None


def sample_counts(config: Config) -> Counts:
    """How many samples each split is asked for: Megatron's numbers. 0 = not read, None = all, once.

    train: all steps. valid: --eval-iters batches for each validation and one more at the end. test: as many, once.
    """
    batches, evaluation = BatchSchedule.from_config(config), config.evaluation
    train = 0 if config.training.skip_train else batches.total_samples
    batch_size = evaluation.eval_global_batch_size or config.training.global_batch_size
    samples = evaluation.eval_iters * batch_size
    rounds = 1 + (batches.total_iterations // evaluation.eval_interval if evaluation.eval_interval else 0)
    if evaluation.full_validation and evaluation.eval_iters:
        return {"train": train, "valid": None, "test": None}
    return {"train": train, "valid": rounds * samples, "test": samples}


def build_datasets(
    config: Config,
    tokenizer: Tokenizer | None,
    sizes: Counts | None = None,
    is_builder: bool = True,
    barrier: Callable[[], object] = lambda: None,
    say: Say = lambda line: None,
) -> Datasets:
    """The datasets that the flags describe, bit-equal to Megatron-core's in tokens and order.

    Args:
        tokenizer: gives the end-of-document token; None where no option needs it.
        sizes: samples wanted; None: `sample_counts`.
        is_builder: whether this process builds index arrays, as one of each node does; all call this function.
        barrier: where the others wait for it, then read the arrays.
        say: takes a line of log for each source.

    Raises:
        ConfigError: paths, weights, splits, files or tokens are wrong; one sentence.
    """
    sizes = sample_counts(config) if sizes is None else sizes
    plan = plan_data(config.data)
    if sizes.get("train") != 0:
        check_trains(plan, config.data)
    options = SampleOptions(
        sequence_length=config.data.seq_length,
        eod=tokenizer.eod if tokenizer is not None else None,
        vocab_size=config.model.vocab_size,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        eod_mask_loss=config.data.eod_mask_loss,
    )
    assembly = _Assembly(config, plan, options, sizes, is_builder, say)
    try:
        datasets = assembly.build() if is_builder else None
        barrier()
        return datasets or assembly.build()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        count = len(assembly.sources)
        raise ConfigError(
            f"too many open files after {count} sources: raise the limit (ulimit -n) or merge sources"
        ) from None


@dataclass
class _Assembly:
    """One walk over the plan: opens each source once, makes the datasets of every split."""

    config: Config
    plan: DataPlan
    options: SampleOptions
    sizes: Counts
    is_builder: bool
    say: Say
    sources: dict[str, TokenSource] = field(default_factory=dict)

    def __post_init__(self):
        data = self.config.data
        # The default split of a small corpus may leave no document for the test: no mistake of the user's.
        self.split_was_given = "split" in self.config.given or data.split not in (None, DEFAULT_SPLIT)
        self.counts = _read_counts(data.per_dataset_sequences_path)
        try:
            if data.data_cache_path is not None:
                Path(data.data_cache_path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--data-cache-path {data.data_cache_path} cannot be made: {error.strerror}, wanted a folder"
            ) from None

    def build(self) -> Datasets:
        datasets: dict[str, dict[str, Samples]] = {split: {} for split in SPLITS}
        for split in SPLITS:
            if self.sizes.get(split, 0) == 0:
                continue
            for name, blend in self.plan.sets[split].items():
                try:
                    datasets[split][name] = self._build_set(split, name, blend)
                except EmptyPartError as error:
                    if split == "train" or not self.plan.shared or self.split_was_given:
                        raise
                    self.say(f"data: no {split} set: {error}")
        return Datasets(datasets["train"].get("train"), datasets["valid"], datasets["test"])

    def _build_set(self, split: str, name: str, blend: Blend) -> Samples:
        size = self.sizes[split]
        if len(blend.prefixes) == 1 and (blend.weights is None or not self.plan.shared):
            dataset: Samples = self._build_part(split, blend, blend.prefixes[0], size)
            self._log(split, name, [dataset], [1.0])
        else:
            dataset = self._build_blend(split, name, blend, size)
        dataset.name = name
        dataset.read_once = split != "train" and self.config.evaluation.full_validation
        if split == "train" and size is not None and len(dataset) < size:
            self.say(
                f"data: {name}: {size:,} samples are wanted, a blend without weights reads each source once and has "
                f"{len(dataset):,}: it is read {size / len(dataset):.2f} times, in the same order each time"
            )
        return dataset

    def _build_blend(self, split: str, name: str, blend: Blend, num_samples: int | None) -> Samples:
        weights = blend.weights if num_samples is not None else None
        asked: list[int | None] = [None] * len(blend.prefixes)
        if weights is not None:
            shares = [math.ceil(num_samples * weight) for weight in weights]
            asked = [math.ceil(share * (1 + MID_LEVEL_SURPLUS)) for share in shares]
        parts = [self._build_part(split, blend, *pair) for pair in zip(blend.prefixes, asked)]
        if weights is None:
            weights = [len(part) for part in parts]
            size = None if num_samples is None else min(num_samples, sum(weights))
        else:
            size = sum(shares)
        entry = build_blend(parts, weights, size, self._cache(blend.prefixes[0]), self.is_builder)
        dataset = BlendedDataset(parts, self._mapped(entry), name)
        if self.config.data.dataloader_type == "cyclic":  # its shuffle depends on how many there are
            dataset.fingerprint += f" of {len(dataset)}"
        self._log(split, name, parts, [used / entry.about["samples"] for used in entry.about["used"]])
        return dataset

    def _build_part(self, split: str, blend: Blend, prefix: str, num_samples: int | None) -> GPTDataset:
        source = self._open(prefix)
        count = len(source.sequence_lengths)
        keep_partial = split != "train" and self.config.evaluation.full_validation
        part = Part(*split_range(self.plan.bounds[split], count), num_samples, keep_partial)
        seed = self.config.training.seed
        try:
            entry = build_entry(source, part, self.options, seed, self._cache(prefix), self.is_builder)
        except EmptyPartError as error:
            cut = f"; --split {self.plan.split_words} gives it documents {part.first:,} to {part.stop:,} of {count:,}"
            where = f"{blend.flag}: the {split} split of {prefix}"
            raise EmptyPartError(f"{where} {error}{cut if self.plan.shared else ''}") from None
        return GPTDataset(source, self._mapped(entry), self.options, split)

    def _mapped(self, entry: IndexEntry) -> IndexEntry:
        if not self.config.data.dataloader_defer_npy_index_mmap:
            entry.arrays  # noqa: B018  maps the file now, so that what is wrong with it shows now
        return entry

    def _open(self, prefix: str) -> TokenSource:
        if prefix in self.sources:
            return self.sources[prefix]
        data, options = self.config.data, self.options
        if data.mock_data:
            source: TokenSource = MockSource(options.vocab_size, options.eod)
        else:
            trusted = data.dataloader_fast_cache_load or not self.is_builder
            source = IndexedDataset(prefix, mmap=not data.no_mmap_bin_files, trusted=trusted)
            if self.is_builder and options.vocab_size is not None:
                check_token_ids(source, options.vocab_size)
        if self.counts is not None:
            _compare_counts(self.counts, prefix, source, data.per_dataset_sequences_path)
        self.sources[prefix] = source
        return source

    def _cache(self, prefix: str) -> IndexCache:
        data = self.config.data
        beside = None if data.mock_data else Path(prefix).parent / "index_cache"
        return IndexCache(data.data_cache_path or beside, trusted=data.dataloader_fast_cache_load)

    def _log(self, split: str, name: str, parts: list[GPTDataset], shares: list[float]) -> None:
        for note in {part.entry.note for part in parts} - {None}:
            self.say(f"data: {split}: {note}")
        for part, share in zip(parts, shares):
            about = part.entry.about
            epochs = f"{about['epochs']:,} epoch{'s' if about['epochs'] > 1 else ''}"
            label = split if name == split else f"{split} {name}"
            self.say(
                f"data: {label}: {part.source.path_prefix}: {about['documents']:,} documents, "
                f"{about['tokens']:,} tokens, {epochs}, {about['samples']:,} samples, share {share:.2%}"
            )


def _read_counts(path: str | None) -> dict[str, list[int]] | None:
    """--per-dataset-sequences-path: {prefix: [sequences, documents]}."""
    if path is None:
        return None
    name = f"--per-dataset-sequences-path {path}"
    stored = read_object(path, name)
    try:
        return {prefix: [int(sequences), int(documents)] for prefix, (sequences, documents) in stored.items()}
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is not JSON of {{prefix: [sequences, documents]}}") from None


def _compare_counts(counts: dict[str, list[int]], prefix: str, source: TokenSource, path: str) -> None:
    seen = [len(source.sequence_lengths), len(source.document_indices) - 1]
    if prefix not in counts:
        raise ConfigError(f"--per-dataset-sequences-path {path} does not name {prefix}, wanted {seen} for it")
    # Megatron-core's own lists hold the number of boundaries, one more than the documents.
    if counts[prefix] not in (seen, [seen[0], seen[1] + 1]):
        raise ConfigError(
            f"--per-dataset-sequences-path {path}: {prefix} has {counts[prefix]} [sequences, documents], "
            f"wanted {seen} as {prefix}.idx says"
        )
