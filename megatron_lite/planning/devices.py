"""GPUs, and a cluster of them: memory, speed, links; how long a collective takes. Imports no torch."""

from dataclasses import dataclass

from megatron_lite.arithmetic.flops import peak_flops

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """One GPU, by its maker's data sheet.

    Args:
        memory: bytes that the driver reports.
        flops: dense bf16 matrix peak, FLOP/s.
        memory_bandwidth, nvlink, network: bytes/s; the links in one direction for each GPU.
        efficiency: share of `flops` that large matrix products reach.
    """

    name: str
    memory: float
    flops: float
    memory_bandwidth: float
    nvlink: float
    network: float
    efficiency: float = 0.65


# Memory in GiB, then GB/s: HBM, NVLink one way (a data sheet gives both ways), network (A100: one 200 Gb/s port for
# each GPU, later ones 400 Gb/s, as the makers' DGX systems have them).
_SHEETS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 79.1, 2039, 300, 25),
    "h100": ("NVIDIA H100 80GB HBM3", 79.6, 3350, 450, 50),
    "h200": ("NVIDIA H200", 139.8, 4800, 450, 50),
    "b200": ("NVIDIA B200", 178.0, 8000, 900, 50),
}
DEVICES: dict[str, Device] = {
    name: Device(name, memory * GIB, peak_flops(device) or 0.0, *(1e9 * speed for speed in speeds))
    for name, (device, memory, *speeds) in _SHEETS.items()
}


def custom_device(memory_gb: float, tflops: float, nvlink_gb_s: float, network_gb_s: float) -> Device:
    """A device by four numbers; its memory bandwidth is taken in the H100's proportion to FLOP/s."""
    model = DEVICES["h100"]
    flops = tflops * 1e12
    bandwidth = model.memory_bandwidth / model.flops * flops
    return Device("custom", memory_gb * 1e9, flops, bandwidth, nvlink_gb_s * 1e9, network_gb_s * 1e9)


@dataclass(frozen=True)
class Cluster:
    """`num_gpus` equal GPUs, `gpus_per_node` of them behind one NVLink switch.

    Args:
        link_efficiency: share of the links' bandwidth that large messages reach.
        latency: seconds that a message or collective takes at least.
        hop: seconds that a ring takes for each further node.
        usable_memory: share of a GPU's memory that tensors may fill; the rest is the allocator's fragments.
        reserved_memory: bytes for CUDA's context and NCCL's buffers.
    """

    device: Device
    num_gpus: int
    gpus_per_node: int
    link_efficiency: float = 0.8
    latency: float = 20e-6
    hop: float = 5e-6
    usable_memory: float = 0.95
    reserved_memory: float = 2 * GIB

    @property
    def memory_limit(self) -> float:
        """Bytes that a rank's tensors may take: usable share of what is left beside the reserve."""
        return self.usable_memory * (self.device.memory - self.reserved_memory)

    def gather_seconds(self, size: float, ranks: int, stride: int) -> float:
        """All-gather (or reduce-scatter) of a whole tensor of `size` bytes over ranks that lie `stride` apart.

        Ring: every rank receives size (n-1)/n over NVLink. Where the group leaves its nodes, each node receives
        size (nodes-1)/nodes through the network ports of the group's k members in it. The slower of the two counts:
            max(size (n-1)/n / nvlink, size (nodes-1)/nodes / (k network)) / link efficiency + latency + (nodes-1) hop
        """
        if ranks == 1:
            return 0.0
        inside = max(1, min(ranks, self.gpus_per_node // stride))
        nodes = ranks / inside
        seconds = size * (ranks - 1) / ranks / self.device.nvlink if inside > 1 else 0.0
        if nodes > 1:
            seconds = max(seconds, size * (nodes - 1) / nodes / (inside * self.device.network))
        return seconds / self.link_efficiency + self.latency + (nodes - 1) * self.hop

    def reduce_seconds(self, size: float, ranks: int, stride: int) -> float:
        """All-reduce: a reduce-scatter and an all-gather of the same size."""
        return 2 * self.gather_seconds(size, ranks, stride)

    def exchange_seconds(self, size: float, ranks: int, stride: int) -> float:
        """All-to-all in which each rank has `size` bytes, an equal part for each of the ranks, itself among them.

        What stays in the node takes NVLink, the rest the GPU's own network port; the slower of the two counts.
        """
        if ranks == 1:
            return 0.0
        inside = max(1, min(ranks, self.gpus_per_node // stride))
        near, far = size * (inside - 1) / ranks, size * (ranks - inside) / ranks
        seconds = max(near / self.device.nvlink, far / self.device.network)
        return seconds / self.link_efficiency + self.latency + (ranks / inside - 1) * self.hop

    def send_seconds(self, size: float, stride: int) -> float:
        """A message of `size` bytes to the GPU `stride` ranks away: size / bandwidth / link efficiency + latency."""
        bandwidth = self.device.nvlink if stride < self.gpus_per_node else self.device.network
        return size / bandwidth / self.link_efficiency + self.latency
