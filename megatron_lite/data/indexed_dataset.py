"""Megatron's tokenized pair PREFIX.bin / PREFIX.idx: strict reader and atomic writer.

Layout of .idx, little endian: 9 bytes magic; uint64 version; uint8 dtype code; uint64 number of sequences; uint64
number of document boundaries; int32 length of each sequence; int64 byte offset of each sequence in .bin; int64
document boundaries in units of sequences. The .bin holds the tokens and nothing else.
"""

import errno
import hashlib
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatron_lite.config import ConfigError
from megatron_lite.files.foreign_files import foreign_content, foreign_file
from megatron_lite.files.writing import aside_of, sync, sync_folder

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries: 34 bytes
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CODES = {name: code for code, name in DTYPES.items()}
_CHUNK = 1 << 16  # checked piece by piece: a piece stays in the cache, the file is read once
_INT32_MAX = 2**31 - 1

Arrays = Callable[[], Iterable[np.ndarray]]


def best_dtype(vocab_size: int | None) -> type[np.integer]:
    """The smallest of Megatron's two token dtypes that holds every id: uint16 up to 65,536 ids, else int32.

    Megatron changes over at 65,500 already; any reader of the format takes both.
    """
    return np.uint16 if vocab_size is not None and vocab_size <= 65536 else np.int32


class IndexedDataset:
    """The sequences of one PREFIX.bin / PREFIX.idx pair, checked in full against one another when opened.

    Attributes:
        sequence_lengths: int32 [sequences], tokens of each sequence (a view of the mapped file, not aligned).
        document_indices: int64 [documents + 1], document d holds sequences [d] .. [d + 1], exclusive.
        dtype: of the tokens in .bin.

    Args:
        path_prefix: path without .bin / .idx.
        mmap: map .bin into memory; False reads with pread, for file systems where a map is slow.
        trusted: another process has checked the pair: look at the header, the sizes and the ends of the arrays only.

    Raises:
        ConfigError: a file is missing or damaged; one sentence with file, field, value seen and value wanted.
    """

    def __init__(self, path_prefix: str | os.PathLike, mmap: bool = True, trusted: bool = False):
        self.path_prefix = os.fspath(path_prefix)
        self.mmap = mmap
        self.idx_path, self.bin_path = f"{self.path_prefix}.idx", f"{self.path_prefix}.bin"
        self.bin_size = _size_of(self.bin_path)
        self._open_index()
        self._check_bin_size() if trusted else self._check_sequences()
        self._check_documents(trusted)
        self._file = -1
        self._tokens = np.empty(0, self.dtype)
        if mmap and self.bin_size:
            # A plain array over the map: slicing np.memmap itself costs a microsecond more each time.
            self._tokens = np.asarray(np.memmap(self.bin_path, dtype=self.dtype, mode="r"))
        elif self.bin_size:
            self._file = os.open(self.bin_path, os.O_RDONLY)

    def _open_index(self) -> None:
        size = _size_of(self.idx_path)
        with Path(self.idx_path).open("rb") as file:
            head = file.read(512)
        if len(head) < HEADER.size:
            what = foreign_content(head)
            raise ConfigError(
                f"{self.idx_path}: file size is {size} bytes, wanted at least {HEADER.size}{what}"
            )
        magic, version, code, sequences, boundaries = HEADER.unpack_from(head)
        if magic != MAGIC:
            what = foreign_content(head, binary=True)
            raise ConfigError(
                f"{self.idx_path}: magic is {magic!r}, wanted {MAGIC!r}: not a Megatron index{what}"
            )
        if version != 1:
            raise ConfigError(f"{self.idx_path}: version is {version}, wanted 1")
        if code not in DTYPES:
            raise ConfigError(f"{self.idx_path}: dtype code is {code}, wanted one of {sorted(DTYPES)}")
        wanted = HEADER.size + 12 * sequences + 8 * boundaries
        if size != wanted:
            what = f"{sequences:,} sequences and {boundaries:,} document boundaries"
            if size == wanted + sequences:
                what += "; it holds one mode per sequence, and multimodal data is not supported"
            raise ConfigError(f"{self.idx_path}: file size is {size:,} bytes, wanted {wanted:,} for {what}")
        if boundaries < 1:
            raise ConfigError(f"{self.idx_path}: number of document boundaries is 0, wanted documents + 1")
        raw = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        ends = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * boundaries]).tolist()
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self.sequence_lengths = np.asarray(raw[ends[0] : ends[1]]).view("<i4")
        self.sequence_pointers = np.asarray(raw[ends[1] : ends[2]]).view("<i8")
        self.document_indices = np.asarray(raw[ends[2] : ends[3]]).view("<i8")

    def _check_sequences(self) -> None:
        """Lengths are not negative, each pointer is where the one before ends, .bin ends where the last does."""
        expected = 0  # byte where the next sequence has to begin
        steps = np.empty(_CHUNK, dtype=np.int64)  # bytes from each pointer to the next, reused
        for first in range(0, len(self), _CHUNK):
            lengths = self.sequence_lengths[first : first + _CHUNK]
            pointers = self.sequence_pointers[first : first + _CHUNK]
            wanted = np.multiply(lengths, self.dtype.itemsize, dtype=np.int64, out=steps[: len(lengths)])
            if lengths.min() < 0:
                bad = int(np.argmax(lengths < 0))
                raise ConfigError(
                    f"{self.idx_path}: length of sequence {first + bad} is {lengths[bad]}, wanted 0 or more"
                )
            if pointers[0] != expected or not np.array_equal(np.diff(pointers), wanted[:-1]):
                begins = expected + np.cumsum(wanted) - wanted
                bad = int(np.argmax(pointers != begins))
                raise ConfigError(
                    f"{self.idx_path}: pointer of sequence {first + bad} is {pointers[bad]:,}, wanted {begins[bad]:,}, "
                    f"the end of the sequence before it in tokens of {self.dtype.name}"
                )
            expected = int(pointers[-1]) + int(wanted[-1])
        self._check_bin_size(expected)

    def _check_bin_size(self, expected: int | None = None) -> None:
        if expected is None:
            last = int(self.sequence_lengths[-1]) * self.dtype.itemsize if len(self) else 0
            expected = int(self.sequence_pointers[-1]) + last if len(self) else 0
        if self.bin_size != expected:
            what = foreign_file(self.bin_path) if self.bin_size else ""
            raise ConfigError(
                f"{self.bin_path}: file size is {self.bin_size:,} bytes, wanted {expected:,} "
                f"by the lengths in {self.idx_path}{what}"
            )
        self.num_tokens = expected // self.dtype.itemsize

    def _check_documents(self, ends_only: bool) -> None:
        """Document boundaries begin at 0, never go back and end at the number of sequences."""
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if first != 0:
            raise ConfigError(f"{self.idx_path}: first document boundary is {first}, wanted 0")
        if last != len(self):
            raise ConfigError(
                f"{self.idx_path}: last document boundary is {last}, wanted {len(self)}, the number of sequences"
            )
        for first in range(0, 0 if ends_only else self.num_documents, _CHUNK):
            piece = self.document_indices[first : first + _CHUNK + 1]
            back = piece[1:] < piece[:-1]
            if back.any():
                bad = int(np.argmax(back))
                raise ConfigError(
                    f"{self.idx_path}: document boundary {first + bad + 1} is {piece[bad + 1]}, "
                    f"wanted at least {piece[bad]}, the one before it"
                )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @cached_property
    def lengths_hash(self) -> str:
        """Hash of the sequence lengths: tells two versions of a file apart where size and time do not."""
        return hashlib.blake2b(np.ascontiguousarray(self.sequence_lengths).data, digest_size=16).hexdigest()

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [length] of sequence `index` from token `offset` on, to its end when no length is given.

        Raises:
            IndexError: no such sequence, or a piece that leaves it.
            ConfigError: .bin was cut after it was opened.
        """
        size = int(self.sequence_lengths[index])
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise IndexError(
                f"{self.bin_path}: sequence {index} has {size} tokens, not [{offset}:{offset + length}]"
            )
        begin = int(self.sequence_pointers[index]) // self.dtype.itemsize + offset
        if self._file < 0:
            return self._tokens[begin : begin + length]
        data = _read_fully(self._file, length * self.dtype.itemsize, begin * self.dtype.itemsize)
        if len(data) != length * self.dtype.itemsize:
            raise ConfigError(
                f"{self.bin_path}: sequence {index} (document {self.document_of(index)}) cannot be read: "
                f"the file ends early, wanted {self.bin_size:,} bytes as when it was opened"
            )
        return np.frombuffer(data, dtype=self.dtype)

    def gather(self, sequences: np.ndarray, offset: int, out: np.ndarray) -> int:
        """Fill `out` with the tokens of `sequences` [k], joined, from token `offset` of the first one on.

        Returns how many tokens were there: len(out), or fewer when the sequences end before.
        """
        begins = self.sequence_pointers[
            sequences
        ].tolist()  # bytes; single numbers are faster outside of numpy
        lengths = self.sequence_lengths[sequences].tolist()
        itemsize, tokens, mapped = self.dtype.itemsize, self._tokens, self._file < 0
        filled, wanted = 0, len(out)
        for position, length in enumerate(lengths):
            length -= offset
            end = filled + length
            if end > wanted:
                length, end = wanted - filled, wanted
            if mapped:
                begin = begins[position] // itemsize + offset
                out[filled:end] = tokens[begin : begin + length]
            else:
                out[filled:end] = self.get(int(sequences[position]), offset, length)
            filled, offset = end, 0
        return filled

    def document_of(self, index: int) -> int:
        """Number of the document that holds sequence `index`."""
        return int(np.searchsorted(self.document_indices, index, side="right")) - 1

    def identity(self) -> dict[str, Any]:
        """What tells one version of the pair from another without reading it: path, sizes, times (plain JSON types)."""
        states = [Path(path).stat() for path in (self.idx_path, self.bin_path)]
        return {
            "path": os.path.abspath(self.path_prefix),  # noqa: PTH100  resolve() would follow links
            "files": [[state.st_size, state.st_mtime_ns] for state in states],
        }

    def __reduce__(self):
        # Worker processes that are spawned open the files again; a map or a descriptor cannot travel.
        return type(self), (self.path_prefix, self.mmap, True)

    def __del__(self):
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)


class IndexedDatasetBuilder:
    """Writes a pair under temporary names; `finalize` makes it appear, whole. Use as a context manager:
    leaving it by an exception removes what was written.

    Args:
        path_prefix: path without .bin / .idx; its folder has to exist.
        dtype: of the tokens, one of Megatron's eight.

    Raises:
        ConfigError: dtype is not one of Megatron's, a token does not fit it, lengths do not sum to the tokens.
        OSError: the disk is full or the folder is not writable.
    """

    def __init__(self, path_prefix: str | os.PathLike, dtype: type[np.number] | str):
        self.dtype = np.dtype(dtype)
        if self.dtype.name not in CODES:
            raise ConfigError(f"dtype is {self.dtype.name}, wanted one of {sorted(CODES)}")
        self.dtype = self.dtype.newbyteorder("<")
        self.path_prefix = os.fspath(path_prefix)
        self._bin_temporary = aside_of(Path(f"{self.path_prefix}.bin"))
        self._idx_temporary = aside_of(Path(f"{self.path_prefix}.idx"))
        self._lengths, self._documents = array("i"), array("q", [0])
        self._bin = self._bin_temporary.open("wb", buffering=1 << 20)

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None) -> None:
        """Append one document: tokens [n], cut into sequences of `lengths` (one sequence when not given)."""
        tokens = self._fitting(tokens)
        lengths = [len(tokens)] if lengths is None else [int(length) for length in lengths]
        if sum(lengths) != len(tokens) or any(not 0 <= length <= _INT32_MAX for length in lengths):
            raise ConfigError(
                f"{self.path_prefix}: document {len(self._documents) - 1}: sequence lengths sum to {sum(lengths):,}, "
                f"wanted {len(tokens):,} tokens, each length from 0 to {_INT32_MAX:,}"
            )
        self._bin.write(tokens.data)
        self._lengths.extend(lengths)
        self._documents.append(len(self._lengths))

    def add_dataset(self, other: IndexedDataset) -> None:
        """Append all documents of another dataset of the same dtype, byte for byte."""
        if other.dtype != self.dtype:
            raise ConfigError(f"{other.idx_path}: dtype is {other.dtype.name}, wanted {self.dtype.name}")
        with Path(other.bin_path).open("rb") as source:
            while piece := source.read(1 << 24):
                self._bin.write(piece)
        before = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(other.sequence_lengths, np.int32).tobytes())
        self._documents.frombytes((other.document_indices[1:] + before).astype(np.int64).tobytes())

    def finalize(self) -> None:
        """Write .idx, bring both to the disk, then give them their names: .bin first, .idx (what readers open) last."""
        sync(self._bin)
        self._bin.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        boundaries = np.frombuffer(self._documents, dtype=np.int64)[1:]
        counts = len(lengths), len(boundaries)
        write_index(self._idx_temporary, self.dtype, *counts, lambda: [lengths], lambda: [boundaries])
        final = Path(f"{self.path_prefix}.idx")
        final.unlink(missing_ok=True)  # an old .idx must never be seen beside the new .bin
        self._bin_temporary.rename(f"{self.path_prefix}.bin")
        self._idx_temporary.rename(final)
        sync_folder(final.parent)

    def abort(self) -> None:
        """Remove what was written so far."""
        self._bin.close()
        self._bin_temporary.unlink(missing_ok=True)
        self._idx_temporary.unlink(missing_ok=True)

    def _fitting(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        values = np.asarray(tokens)
        if values.dtype == self.dtype or not values.size:
            return np.ascontiguousarray(values, self.dtype)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = values.min(), values.max()
            if low < limits.min or high > limits.max:
                raise ConfigError(
                    f"{self.path_prefix}: document {len(self._documents) - 1}: token id is "
                    f"{low if low < limits.min else high}, wanted {limits.min} to {limits.max} ({self.dtype.name})"
                )
        return np.ascontiguousarray(values, self.dtype)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or not self._bin.closed:
            self.abort()


def _size_of(path: str) -> int:
    """Bytes of a file that can be read."""
    try:
        with Path(path).open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        hint = ""
        if path.endswith((".bin.idx", ".idx.idx", ".bin.bin", ".idx.bin")):
            hint = "; give the path without .bin or .idx"
        raise ConfigError(
            f"{path}: cannot be opened ({error.strerror}), wanted a .bin and .idx pair{hint}"
        ) from None


def _read_fully(file: int, size: int, offset: int) -> bytes:
    """pread until `size` bytes are there or the file ends: one call may return less, at most 2 GB on Linux."""
    data = os.pread(file, size, offset)
    while len(data) < size:
        more = os.pread(file, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def write_index(
    path: Path, dtype: np.dtype, num_sequences: int, num_documents: int, lengths: Arrays, boundaries: Arrays
) -> None:
    """Write an .idx file piece by piece, synced to the disk, so that its size does not matter.

    Args:
        lengths: called for a fresh pass over the tokens of each sequence, as arrays that together have
            `num_sequences` entries.
        boundaries: likewise the number of sequences up to the end of each document, `num_documents` entries; the
            leading 0 is written here.
    """
    with path.open("wb", buffering=1 << 20) as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[dtype.name], num_sequences, num_documents + 1))
        for piece in lengths():
            file.write(piece.astype("<i4").data)
        end = 0
        for piece in lengths():
            ends = np.cumsum(piece, dtype=np.int64) * dtype.itemsize + end
            if len(ends):
                file.write((ends - piece.astype(np.int64) * dtype.itemsize).astype("<i8").data)
                end = int(ends[-1])
        file.write(np.zeros(1, "<i8").data)
        for piece in boundaries():
            file.write(piece.astype("<i8").data)
        sync(file)
        assert file.tell() == HEADER.size + 12 * num_sequences + 8 * (num_documents + 1)
