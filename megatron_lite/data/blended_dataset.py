"""Several sources mixed by weight, each sample's source as in Megatron-core's BlendedDataset."""

import hashlib
from collections.abc import Sequence

import numpy as np

from megatron_lite.data.index_cache import Arrays, IndexCache, IndexEntry
from megatron_lite.data.index_kernels import build_blend_index
from megatron_lite.data.samples import Samples


class BlendedDataset(Samples):
    """Sample i is sample `dataset_sample_index[i]` of source `dataset_index[i]`."""

    def __init__(self, sources: Sequence[Samples], entry: IndexEntry, name: str = ""):
        """entry: the arrays dataset_index and dataset_sample_index, as `build_blend` makes them."""
        self.sources = list(sources)
        self.options = sources[0].options
        self.name = name
        self.entry = entry
        # Not how many samples there are: a longer run reads the same ones first, unless a source's own order changes.
        self.fingerprint = entry.about["content"][:16]

    def __len__(self) -> int:
        return self.entry.about["samples"]

    @property
    def source_names(self) -> list[str]:
        return [name for source in self.sources for name in source.source_names]

    def source_of(self, index: int) -> int:
        return int(self.entry.arrays["dataset_index"][index])

    def place(self, index: int) -> tuple[Samples, int]:
        """The source of a sample, and the sample's number in it."""
        arrays = self.entry.arrays
        return self.sources[arrays["dataset_index"][index]], int(arrays["dataset_sample_index"][index])

    def read(self, index: int, out: np.ndarray) -> int:
        source, number = self.place(index)
        return source.read(number, out)

    def find_token(self, index: int, position: int = 0) -> str:
        source, number = self.place(index)
        return source.find_token(number, position)


def build_blend(
    sources: Sequence[Samples], weights: Sequence[float], size: int | None, cache: IndexCache, store: bool
) -> IndexEntry:
    """The blend's arrays for `size` samples, or for all samples of all sources, each once, when size is None.

    Args:
        weights: above 0; when size is None, the sources' lengths.
    """
    parts = [f"{source.fingerprint} {weight!r}" for source, weight in zip(sources, weights, strict=True)]
    order = "by weight" if size is not None else "each once"
    content = hashlib.sha256(" ".join([order, *parts]).encode()).hexdigest()[:32]

    def build() -> tuple[dict[str, object], Arrays]:
        share = np.asarray(weights, dtype=np.float64)
        share = share / share.sum()
        limits = None if size is not None else np.asarray([len(source) for source in sources])
        total = int(limits.sum()) if limits is not None else size
        dataset_index, sample_index = build_blend_index(share, total, limits)
        used = np.bincount(dataset_index, minlength=len(sources)).tolist()
        about = {"samples": total, "used": used}
        return about, {"dataset_index": dataset_index, "dataset_sample_index": sample_index}

    description = {"kind": "blend 1", "weights": list(weights), "size": size, "sources": content}
    return cache.get(description, lambda: content, build, store)
