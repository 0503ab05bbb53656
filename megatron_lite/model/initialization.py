"""Initial weights: a pure function of (seed, global parameter name, position in the tensor).

No layout, rank, chunk or device takes part, so every layout starts from the same bits. A tensor is made in
blocks of rows, each from its own generator, so a rank makes only the rows that it owns.
"""

import hashlib
import math

import torch

from megatron_lite.config.model import ModelConfig

BLOCK_ELEMENTS = 1 << 18
EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"

Shape = tuple[int, ...]


def initial_rows(name: str, shape: Shape, rows: torch.Tensor, config: ModelConfig, seed: int) -> torch.Tensor:
    """The initial values of some rows of a parameter.

    Args:
        name: global parameter name.
        shape: its full shape.
        rows: int64 [R], the rows wanted, ascending, none twice.

    Returns:
        fp32 [R, *shape[1:]] on the CPU: normal(0, std), output projections std / sqrt(2 L), norms 1
        (0 when zero-centred), biases 0 (Megatron-LM's init_method and scaled_init_method).
    """
    kind = name.rsplit(".", 1)[1]
    is_norm = "norm" in name.rsplit(".", 2)[-2]
    if kind == "bias":
        return torch.zeros(len(rows), *shape[1:])
    if is_norm:
        return torch.full((len(rows), *shape[1:]), 0.0 if config.apply_layernorm_1p else 1.0)
    std = config.init_method_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2.0 * config.num_layers)
    return _normal_rows(name, shape, rows, seed).mul_(std)


def _normal_rows(name: str, shape: tuple[int, ...], rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Standard normal rows: block b holds rows b*R..(b+1)*R and has a generator of its own."""
    row_elements = math.prod(shape[1:])
    block_rows = max(1, BLOCK_ELEMENTS // row_elements)
    out = torch.empty(len(rows), *shape[1:])
    for block in torch.unique(rows // block_rows).tolist():
        first = block * block_rows
        size = min(block_rows, shape[0] - first)
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        start, stop = torch.searchsorted(rows, torch.tensor([first, first + size])).tolist()
        if stop - start == size:  # the whole block, in place
            out[start:stop].normal_(generator=generator)
        else:
            values = torch.empty(size, *shape[1:]).normal_(generator=generator)
            out[start:stop] = values[rows[start:stop] - first]
    return out
