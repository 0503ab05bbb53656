"""Megatron's tokenized pair PREFIX.bin / PREFIX.idx: strict reader and atomic writer.

Layout of .idx, little endian: 9 bytes magic; uint64 version; uint8 dtype code; uint64 number of sequences; uint64
number of document boundaries; int32 length of each sequence; int64 byte offset of each sequence in .bin; int64
document boundaries in units of sequences. The .bin holds the tokens and nothing else.
"""

import errno
import hashlib
import os
import struct
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.config.declare import ConfigError
from megatron_lite.files.foreign_files import foreign_content, foreign_file
from megatron_lite.files.writing import aside_of, sync, sync_folder, write_aside

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries: 34 bytes
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CODES = {name: code for code, name in DTYPES.items()}
_CHUNK = 1 << 16  # checked piece by piece: a piece stays in the cache, the file is read once

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
        self.idx_path, self.bin_path = f"{self.path_prefix}.idx", f"{self.path_prefix}.bin"
        self.bin_size = _size_of(self.bin_path)
        self._open_index()
        if not trusted:
            self._check_sequences()
        self._check_bin_size()
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
            raise self._wrong("file size", f"{size} bytes", f"at least {HEADER.size}{what}")
        magic, version, code, sequences, boundaries = HEADER.unpack_from(head)
        if magic != MAGIC:
            what = foreign_content(head, binary=True)
            raise self._wrong("magic", repr(magic), f"{MAGIC!r}: not a Megatron index{what}")
        if version != 1:
            raise self._wrong("version", version, 1)
        if code not in DTYPES:
            raise self._wrong("dtype code", code, f"one of {sorted(DTYPES)}")
        ends = list(accumulate((HEADER.size, 4 * sequences, 8 * sequences, 8 * boundaries)))
        if size != ends[-1]:
            what = f"{sequences:,} sequences and {boundaries:,} document boundaries"
            if size == ends[-1] + sequences:
                what += "; it holds one mode per sequence, and multimodal data is not supported"
            raise self._wrong("file size", f"{size:,} bytes", f"{ends[-1]:,} for {what}")
        if boundaries < 1:
            raise self._wrong("number of document boundaries", 0, "documents + 1")
        raw = np.asarray(np.memmap(self.idx_path, dtype=np.uint8, mode="r"))
        self.dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        self.sequence_lengths = raw[ends[0] : ends[1]].view("<i4")
        self.sequence_pointers = raw[ends[1] : ends[2]].view("<i8")
        self.document_indices = raw[ends[2] : ends[3]].view("<i8")

    def _wrong(self, field: str, seen: Any, wanted: Any) -> ConfigError:
        return ConfigError(f"{self.idx_path}: {field} is {seen}, wanted {wanted}")

    def _check_sequences(self) -> None:
        """Lengths are not negative, and each pointer is where the sequence before it ends."""
        expected = 0  # byte where the next sequence has to begin
        steps = np.empty(_CHUNK, dtype=np.int64)  # bytes from each pointer to the next, reused
        for first in range(0, len(self), _CHUNK):
            lengths = self.sequence_lengths[first : first + _CHUNK]
            pointers = self.sequence_pointers[first : first + _CHUNK]
            sizes = np.multiply(lengths, self.dtype.itemsize, dtype=np.int64, out=steps[: len(lengths)])
            if lengths.min() < 0:
                bad = int(np.argmax(lengths < 0))
                raise self._wrong(f"length of sequence {first + bad}", lengths[bad], "0 or more")
            if pointers[0] != expected or not np.array_equal(np.diff(pointers), sizes[:-1]):
                begins = expected + np.cumsum(sizes) - sizes
                bad = int(np.argmax(pointers != begins))
                end = f"{begins[bad]:,}, the end of the sequence before it in tokens of {self.dtype.name}"
                raise self._wrong(f"pointer of sequence {first + bad}", f"{pointers[bad]:,}", end)
            expected = int(pointers[-1]) + int(sizes[-1])

    def _check_bin_size(self) -> None:
        """The .bin ends where the last sequence does."""
        expected = 0
        if len(self):
            expected = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
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
            raise self._wrong("first document boundary", first, 0)
        if last != len(self):
            raise self._wrong("last document boundary", last, f"{len(self)}, the number of sequences")
        for first in range(0, 0 if ends_only else self.num_documents, _CHUNK):
            piece = self.document_indices[first : first + _CHUNK + 1]
            back = piece[1:] < piece[:-1]
            if back.any():
                bad = int(np.argmax(back))
                before = f"at least {piece[bad]}, the one before it"
                raise self._wrong(f"document boundary {first + bad + 1}", piece[bad + 1], before)

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
        # In bytes. Single numbers are faster outside of numpy.
        begins = self.sequence_pointers[sequences].tolist()
        lengths = self.sequence_lengths[sequences].tolist()
        itemsize, tokens, mapped = self.dtype.itemsize, self._tokens, self._file < 0
        filled, size = 0, len(out)
        for position, length in enumerate(lengths):
            length -= offset
            end = filled + length
            if end > size:
                length, end = size - filled, size
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
        """Path, sizes and times (plain JSON types): what differs between two versions of the pair."""
        states = [Path(path).stat() for path in (self.idx_path, self.bin_path)]
        path = os.path.abspath(self.path_prefix)  # noqa: PTH100  resolve() would follow links
        return {"path": path, "files": [[state.st_size, state.st_mtime_ns] for state in states]}

    def __del__(self):
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)


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
            f"{path}: cannot be opened ({error.strerror}), wanted .bin and .idx{hint}"
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


def write_index(path: Path, dtype: np.dtype, lengths: Arrays, boundaries: Arrays) -> None:
    """Write an .idx file piece by piece, synced to the disk, so that its size does not matter.

    Args:
        lengths: called for a fresh pass over the tokens of each sequence, in arrays.
        boundaries: likewise the number of sequences up to the end of each document; the leading 0 is written here.
    """
    sequences, documents = sum(map(len, lengths())), sum(map(len, boundaries()))
    with path.open("wb", buffering=1 << 20) as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[dtype.name], sequences, documents + 1))
        for piece in lengths():
            file.write(piece.astype("<i4").data)
        end = 0
        for piece in lengths():
            ends = np.cumsum(piece, dtype=np.int64) * dtype.itemsize + end
            file.write((ends - piece.astype(np.int64) * dtype.itemsize).astype("<i8").data)
            end = int(ends[-1]) if len(ends) else end
        file.write(np.zeros(1, "<i8").data)
        for piece in boundaries():
            file.write(piece.astype("<i8").data)
        sync(file)


def publish_pair(prefix: str, bin_path: Path, idx_path: Path, about: dict[str, Any] | None) -> None:
    """Give files that are whole and on the disk the names PREFIX.bin and, last, PREFIX.idx, which readers open.

    Can be repeated after an interruption. `about` goes into PREFIX.json; None: there is none.
    """
    final = Path(f"{prefix}.idx")
    if bin_path.exists():
        final.unlink(missing_ok=True)  # an old .idx must never be seen beside the new .bin
        if about is None:
            Path(f"{prefix}.json").unlink(missing_ok=True)
        else:
            write_aside(Path(f"{prefix}.json"), about)
        bin_path.rename(f"{prefix}.bin")
    if idx_path.exists():
        idx_path.rename(final)
    sync_folder(final.parent)


def write_pair(
    prefix: str,
    dtype: np.dtype,
    tokens: Iterable[bytes | memoryview],
    lengths: Arrays,
    boundaries: Arrays,
    about: dict[str, Any] | None = None,
) -> None:
    """Write PREFIX.bin from the bytes of `tokens`, and its .idx as `write_index` does; both appear whole.

    Raises OSError; nothing half-made stays then.
    """
    bin_path, idx_path = aside_of(Path(f"{prefix}.bin")), aside_of(Path(f"{prefix}.idx"))
    try:
        with bin_path.open("wb", buffering=1 << 20) as file:
            file.writelines(tokens)
            sync(file)
        write_index(idx_path, dtype, lengths, boundaries)
        publish_pair(prefix, bin_path, idx_path, about)
    finally:
        bin_path.unlink(missing_ok=True)
        idx_path.unlink(missing_ok=True)
