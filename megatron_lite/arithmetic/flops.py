"""Floating-point operations of a training step, and what devices can do: the two sides of MFU. Imports no torch."""

import re

from megatron_lite.arithmetic.costs import model_costs
from megatron_lite.config import Config

# Dense bf16 matrix peak in TFLOP/s from the makers' data sheets, by the device's name as CUDA or ROCm gives it.
# Sparsity is not counted. A name that matches nothing has no peak: rather no MFU than a wrong one.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"NVIDIA GB300", 2500),
    (r"NVIDIA B300( SXM\d?( AC)?)?", 2250),
    (r"NVIDIA GB200", 2500),
    (r"NVIDIA B200", 2250),
    (r"NVIDIA B100", 1750),
    (r"NVIDIA GH200 .*|NVIDIA GH200", 989.4),
    (r"NVIDIA H200", 989.4),
    (r"NVIDIA H200 NVL|NVIDIA H100 NVL", 835.5),
    (r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM.*|NVIDIA H800", 989.4),
    (r"NVIDIA H100 PCIe", 756.5),
    (r"NVIDIA H20", 148),
    (r"NVIDIA A100.*|A100-.*|NVIDIA A800.*", 311.9),
    (r"NVIDIA A40", 149.7),
    (r"NVIDIA A30", 165),
    (r"NVIDIA A10", 125),
    (r"NVIDIA L40S", 362),
    (r"NVIDIA L40", 181),
    (r"NVIDIA L4", 121),
    (r"NVIDIA RTX A6000", 154.8),
    (r"NVIDIA RTX 6000 Ada Generation", 364.2),
    (r"NVIDIA GeForce RTX 3090", 71),
    (r"NVIDIA GeForce RTX 4090", 165.2),
    (r"NVIDIA GeForce RTX 5090", 209.5),
    (r"AMD Instinct MI250X.*", 191.5),  # one of its two dies is one device
    (r"AMD Instinct MI300X.*|AMD Instinct MI325X.*", 1307.4),
    (r"AMD Instinct MI355X.*", 2516.6),
)


def flops_per_step(config: Config, global_batch_size: int) -> int:
    """Forward and backward FLOPs of one optimizer step over the whole model and batch, as Megatron counts them.

    6 B S (L (h (q + 2 kv) + q h + m h ffn) + h V) + 6 B S^2 L q: recomputed work is not counted, so the throughput
    made from it is of the model, not of the hardware. In a mixture ffn is the K experts' and the shared one's together;
    the router is not counted. The padded vocabulary has to be known.
    """
    return global_batch_size * model_costs(config.model, config.data.seq_length).flops


def tflops_per_device(config: Config, global_batch_size: int, seconds: float) -> float:
    """Model TFLOP/s of each process, for a step that took `seconds`."""
    return flops_per_step(config, global_batch_size) / seconds / config.parallel.world_size / 1e12


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a device in FLOP/s by its name; None when it is not known (a slice of one included)."""
    for pattern, teraflops in _PEAKS:
        if re.fullmatch(pattern, device_name.strip()) and "MIG" not in device_name:
            return teraflops * 1e12
    return None
