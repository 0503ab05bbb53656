"""What a step holds and sends, counted while it runs: live bytes by what they are for, messages by kind and axis.

It looks at storages and operators, not at who called them, so real and fake tensors are counted alike.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_lite.distributed.tensors import local_part
from megatron_lite.distributed.torch_private import (
    TorchDispatchMode,
    resolve_process_group,
    sharding_propagator,
    tree_leaves,
    without_dispatch_modes,
)

# What live bytes are for.
PARAMETERS = "parameters"
OPTIMIZER = "optimizer state"
BUFFERS = "batch and receive buffers"
ACTIVATIONS = "activations"
GATHERED = "gathered weights"
WORKSPACE = "gradients and workspace"

# Part of an operator's name -> the kind of message; the first that fits.
MESSAGES = {
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "all_reduce": "all-reduce",
    "allreduce": "all-reduce",
    "all_to_all": "all-to-all",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "isend": "send",
    "send": "send",
    "irecv": "receive",
    "recv": "receive",
}
GATHERING = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy")
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


@dataclass(frozen=True)
class Message:
    """One kind of communication over one axis: its number, and bytes of the whole tensors (not of one shard)."""

    kind: str
    axis: str
    group_size: int
    count: int
    bytes: int

    @property
    def sent(self) -> int:
        """Bytes that this rank sends, with the ring algorithms that NCCL uses for large messages."""
        others = self.group_size - 1
        if self.kind in ("send", "broadcast"):
            return self.bytes
        if self.kind == "receive":
            return 0
        return self.bytes * others * (2 if self.kind == "all-reduce" else 1) // self.group_size


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a (possibly distributed) tensor's piece on this rank."""
    return local_part(tensor).untyped_storage()


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind the pieces on this rank, each storage once, padding included."""
    storages = WeakIdKeyDictionary()
    for tensor in tensors:
        storages[storage_of(tensor)] = None
    return sum(storage.nbytes() for storage in storages)


class Accounting(TorchDispatchMode):
    """Counts inside the block: `live` bytes by purpose, the `peak` of their sum and its parts, and `messages`.

    Storages are held weakly, so counting frees nothing later. FSDP frees gathered weights by resizing their storage,
    which no operator shows: those are measured again whenever a new peak is in sight. What a kernel takes for
    itself while it runs is not seen.

    Args:
        axes: name of a process group -> the mesh axis to report it under.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = axes
        self._purpose = WORKSPACE
        self._storages: dict[int, tuple[weakref.ref, int, str]] = {}  # id -> reference, bytes, purpose
        self._resizable: set[int] = set()
        self.live: dict[str, int] = defaultdict(int)
        self.total = 0
        self.peak = 0
        self.peak_parts: dict[str, int] = {}
        self.most: dict[str, int] = defaultdict(int)
        self._messages: dict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0])

    def __enter__(self) -> "Accounting":
        """Start counting; what DTensor asks fake tensors of global shapes is no memory of this rank and is left out."""
        ask = sharding_propagator._propagate_tensor_meta_non_cached

        def ask_apart(schema: Any) -> Any:
            with without_dispatch_modes():
                return ask(schema)

        sharding_propagator._propagate_tensor_meta_non_cached = ask_apart
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Stop counting."""
        super().__exit__(*error)
        del sharding_propagator._propagate_tensor_meta_non_cached

    @property
    def messages(self) -> list[Message]:
        """What was communicated since the start, the most bytes first."""
        found = [Message(*key, *numbers) for key, numbers in self._messages.items()]
        return sorted(found, key=lambda message: (-message.bytes, message.kind, message.axis))

    def start(self) -> None:
        """A step begins: forget the peaks and messages so far; what is alive stays counted."""
        self.peak, self.peak_parts = 0, {}
        self.most = defaultdict(int, self.live)
        self._messages.clear()
        self._purpose = BUFFERS  # until the first forward begins

    def label(self, tensors: Iterable[torch.Tensor], purpose: str) -> None:
        """Say what the storages of these tensors are for; they are counted from now on."""
        for tensor in tensors:
            self._note(storage_of(tensor), purpose, relabel=True)

    def label_rest(self, old: str, new: str) -> None:
        """Give everything alive of one purpose another, at its size now: FSDP over one rank frees by resizing too."""
        for reference, _, purpose in list(self._storages.values()):
            storage = reference()
            if purpose == old and storage is not None:
                self._note(storage, new, relabel=True)

    def watch_forward(self, module: nn.Module) -> None:
        """What the module's forward makes and leaves behind is activations."""
        module.register_forward_pre_hook(self._forward_begins, prepend=True)
        module.register_forward_hook(self._forward_ends, always_call=True)

    def _forward_begins(self, module: nn.Module, inputs: Any) -> None:
        self._purpose = ACTIVATIONS

    def _forward_ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._purpose = WORKSPACE

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, then count what it made and what it sent."""
        if any(issubclass(kind, DTensor) for kind in types):
            return (
                NotImplemented  # DTensor turns it into operators on my piece and messages: those are counted
            )
        kwargs = kwargs or {}
        out = self.run(function, args, kwargs)
        if function.namespace in NAMESPACES:
            self._count_message(function._schema.name, [*args, *kwargs.values()], out)
        if function.is_view:
            return out
        # Weights that are cut along another dim than the first are put together by a concatenation into their place.
        gathers = function._schema.name in GATHERING or function is torch.ops.aten.cat.out
        purpose = GATHERED if gathers else self._purpose
        for tensor in _plain_tensors(out):
            self._note(tensor.untyped_storage(), purpose)
        if gathers:
            for tensor in _plain_tensors(kwargs.get("out", ())):
                storage = tensor.untyped_storage()
                self._note(storage, GATHERED, relabel=True)
                self._resizable.add(id(storage))
        self._look_for_peak()
        return out

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result."""
        return function(*args, **kwargs)

    def _note(self, storage: torch.UntypedStorage, purpose: str, relabel: bool = False) -> None:
        key, size = id(storage), storage.nbytes()
        known = self._storages.get(key)
        if known is not None:
            reference, old_size, old_purpose = known
            purpose = purpose if relabel else old_purpose
            if (old_size, old_purpose) == (size, purpose):
                return
            self._add(old_purpose, -old_size)
        else:
            reference = weakref.ref(storage, lambda _, key=key: self._forget(key))
        self._storages[key] = (reference, size, purpose)
        self._add(purpose, size)

    def _forget(self, key: int) -> None:
        known = self._storages.pop(key, None)
        self._resizable.discard(key)
        if known is not None:
            self._add(known[2], -known[1])

    def _add(self, purpose: str, size: int) -> None:
        self.live[purpose] += size
        self.total += size
        if self.live[purpose] > self.most[purpose]:
            self.most[purpose] = self.live[purpose]

    def _look_for_peak(self) -> None:
        if self.total <= self.peak:
            return
        for key in list(self._resizable):
            storage = self._storages[key][0]()
            if storage is not None:
                self._note(storage, GATHERED)
        if self.total > self.peak:
            self.peak = self.total
            self.peak_parts = {purpose: size for purpose, size in self.live.items() if size}

    def _count_message(self, name: str, arguments: list[Any], out: Any) -> None:
        kind = next((kind for part, kind in MESSAGES.items() if part in name.split("::")[1]), None)
        group = next((found for found in map(_group, arguments) if found is not None), None)
        if kind is None or group is None or group.size() == 1:
            return
        tensors = [_plain_tensors(item) for item in [*arguments, out]]
        if kind in ("send", "receive") and not any(t.is_floating_point() for item in tensors for t in item):
            return  # the stages' vote about their shapes, once for each schedule
        size = max(sum(t.nbytes for t in item) for item in tensors)
        axis = self._axes.get(group.group_name, group.group_name)
        numbers = self._messages[kind, axis, group.size()]
        numbers[0] += 1
        numbers[1] += size


def _plain_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a result that lie on a device."""
    leaves = [tree] if isinstance(tree, torch.Tensor) else tree_leaves(tree)
    return [t for t in leaves if isinstance(t, torch.Tensor) and not _is_meta(t)]


def _is_meta(tensor: torch.Tensor) -> bool:
    # Asking a fake tensor for its device is an operator of its own.
    return (getattr(tensor, "fake_device", None) or tensor.device).type == "meta"


def _group(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an argument of a communication operator is: an object, or a group's name."""
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:  # a reduction's kind, or a work handle
            return None
    if isinstance(argument, str):
        try:
            return resolve_process_group(argument)
        except (RuntimeError, ValueError, LookupError):  # another text, such as "sum"
            return None
    return None
