"""Which sample stands at which position of the endless order that a run reads: a pure function."""

from dataclasses import dataclass

_ROUNDS = 8
_MASK = 2**64 - 1


@dataclass(frozen=True)
class SampleOrder:
    """Positions 0, 1, 2, ... count samples consumed since the start of the run.

    Attributes:
        num_samples: of the dataset.
        cyclic: shuffle the dataset anew each time it is read; else it is read in its own order (GPT samples are
            shuffled already).
        read_once: positions behind the end hold no sample; else reading starts over.
    """

    num_samples: int
    seed: int = 0
    cyclic: bool = False
    read_once: bool = False

    def sample_at(self, position: int) -> int | None:
        """The sample at a position; None behind the end of a dataset that is read once."""
        epoch, place = divmod(position, self.num_samples)
        if self.read_once:
            return place if epoch == 0 else None
        return permute(place, self.num_samples, self.seed, epoch) if self.cyclic else place


def permute(value: int, size: int, seed: int, epoch: int) -> int:
    """Where `value` goes in the shuffle of range(size) that seed and epoch choose.

    A Feistel network over the next even power of two, walked until the value is inside: any place of a shuffle of
    any size, without an array and without drawing what comes before.
    """
    half = max(1, (size - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = value >> half, value & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(right, seed, epoch, turn) & mask)
        value = left << half | right
        if value < size:
            return value


def _mix(value: int, seed: int, epoch: int, turn: int) -> int:
    """SplitMix64 of all four."""
    key = value
    for part in (seed, epoch, turn):
        key = (key ^ part) + 0x9E3779B97F4A7C15 & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key
