"""Bytes of tensors that live at once while code runs; `python -m tests.parallel.live_bytes` prints the docs' table."""

import gc
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.rehearsal.parity import my_samples
from tests.parity import make_batches, make_config, set_up
from tests.ranks import run_ranks

MIB = 1 << 20
# Wide enough that activations and logits, not small change, are what is seen.
MODEL = {
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "vocab_size": 2000,
    "padded_vocab_size": 2048,
    "max_position_embeddings": 16,
}


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes of all storages made inside the block and still alive.

    Bytes are counted when asked, not when made: FSDP frees by resizing.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        self.peak = max(self.peak, self.live())
        return out

    def live(self):
        """Bytes alive now."""
        storages = [(key, reference()) for key, reference in self._storages.items()]
        self._storages = {key: self._storages[key] for key, storage in storages if storage is not None}
        return sum(storage.nbytes() for _, storage in storages if storage is not None)


def step_peak(config, microbatches):
    """Peak live bytes of one train_step on this rank, beyond the model and the batch (a top-level rank function)."""
    run = set_up(config)
    mesh, pipeline = run.mesh, run.pipeline
    batch = my_samples(make_batches(config.training.global_batch_size, 1)[0], config, mesh)
    pipeline.train_step(batch, microbatches, 1.0)  # receive buffers and gradients are there from now on
    gc.collect()
    with LiveBytes() as live:
        pipeline.train_step(batch, microbatches, 1.0)
    return live.peak


def peaks(microbatches=8, samples=8, model=None, **layout):
    """`step_peak` of every rank, in bytes."""
    config = make_config(
        microbatches=microbatches, micro_batch_size=samples, model=MODEL | (model or {}), **layout
    )
    return run_ranks(step_peak, config.parallel.world_size, config, microbatches, init=True)


ROWS = {
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": {"pp": 2},
    "interleaved-1f1b, 2 chunks": {"pp": 2, "chunks": 2},
    "zbv": {"pp": 2, "chunks": 2, "schedule": "zbv"},
    "dualpipev": {"pp": 2, "chunks": 2, "schedule": "dualpipev"},
    "1f1b, recompute core_attn": {"pp": 2, "recompute_granularity": "selective"},
    "1f1b, recompute core_attn, layernorm, mlp": {
        "pp": 2,
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "layernorm", "mlp"),
    },
    "1f1b, recompute full": {"pp": 2, "recompute_granularity": "full"},
    "1f1b, recompute full, units of 4": {
        "pp": 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 4,
    },
    "1f1b, recompute full, first 2 blocks of a stage": {
        "pp": 2,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
    "gpipe, at most 2 microbatches a pass": {
        "pp": 2,
        "schedule": "gpipe",
        "max_microbatches_per_step": 2,
    },
    "1f1b, tp 2": {"pp": 2, "tp": 2},
    "1f1b, tp 2 + sequence parallel": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "1f1b, cp 2": {"pp": 2, "cp": 2},
}


def main():
    """The table of docs/parallelism.md: pp 2, 8 microbatches of 8 x 16 tokens, 8 layers of width 64."""
    print("| layout | first stage, MiB | last stage, MiB |\n| --- | ---: | ---: |")
    for name, layout in ROWS.items():
        ranks = peaks(**layout)
        first, last = ranks[0] / MIB, ranks[-1] / MIB
        print(f"| {name} | {first:.2f} | {last:.2f} |", flush=True)


if __name__ == "__main__":
    main()
