"""What our steps are measured against: the same model and loop written by hand in bare PyTorch, on one page.

    python -m tools.benchmarks.baseline_model '{"layers": 2, ...}' [FILE with weights and a batch]

is the program that a start is measured against: one step, its loss. Imports nothing but torch. Parameters have our
global names, so scripts.with_initial_weights gives both sides the same first bits; as in our pipeline a model may be
only some layers of the whole.

Shapes: B micro batch, S sequence, H hidden, N heads, D head width, V vocabulary; E experts of width W, K of a token.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

LEARNING_RATE, WEIGHT_DECAY, BETAS, EPSILON, CLIP = 1e-3, 0.1, (0.9, 0.95), 1e-8, 1.0
NORM_EPSILON, ROTARY_BASE = 1e-5, 10000.0


@dataclass(frozen=True)
class Sizes:
    """A Llama-style model and its micro batch; the defaults are the sizes that the targets are set for.

    experts, chosen: a mixture of so many MLPs in every layer, and how many of them a token goes to; 0 for none.
    """

    layers: int = 8
    hidden: int = 256
    heads: int = 8
    ffn: int = 704
    seq_length: int = 256
    vocabulary: int = 8192
    micro_batch: int = 4
    experts: int = 0
    chosen: int = 2


QUICK = Sizes(layers=2, hidden=32, heads=2, ffn=64, seq_length=16, vocabulary=128, micro_batch=2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions by halves (Su et al. 2021): x [B, N, S, D], cos and sin [S, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention by F.scaled_dot_product_attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(sizes.hidden, sizes.hidden, bias=False))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        batch, seq_length, hidden = x.shape
        q, k, v = (
            project(x).view(batch, seq_length, self.heads, -1).transpose(1, 2)  # [B, N, S, D]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq_length, hidden))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.down_proj = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """The K experts of the largest router logits, weighted by a softmax over these (as Mixtral), without loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.chosen, self.num_experts = sizes.chosen, sizes.experts
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        shapes = {"gate_proj": (sizes.ffn, sizes.hidden), "up_proj": (sizes.ffn, sizes.hidden)}
        shapes["down_proj"] = (sizes.hidden, sizes.ffn)
        self.experts = nn.ModuleDict({name: nn.ParameterDict() for name in shapes})
        for name, shape in shapes.items():
            self.experts[name]["weight"] = nn.Parameter(torch.empty(sizes.experts, *shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        tokens = x.flatten(0, 1)  # [T, H]
        logits, experts = self.router(tokens).topk(self.chosen)  # [T, K]
        weights = logits.softmax(dim=-1).flatten()
        order = experts.flatten().argsort(stable=True)
        ends = torch.bincount(experts.flatten(), minlength=self.num_experts).cumsum(0).int()
        rows = tokens[order // self.chosen]  # [T*K, H], sorted by expert

        def project(rows: torch.Tensor, name: str) -> torch.Tensor:
            return F.grouped_mm(rows, self.experts[name]["weight"].transpose(1, 2), offs=ends)

        inner = F.silu(project(rows, "gate_proj")) * project(rows, "up_proj")
        out = project(inner * weights[order, None], "down_proj")
        return torch.zeros_like(tokens).index_add(0, order // self.chosen, out).view_as(x)


class Block(nn.Module):
    """Pre-norm block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(sizes.hidden, eps=NORM_EPSILON)
        self.attention = Attention(sizes)
        self.pre_mlp_norm = nn.RMSNorm(sizes.hidden, eps=NORM_EPSILON)
        self.mlp = Mixture(sizes) if sizes.experts else SwiGLU(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]."""
        x = x + self.attention(self.input_norm(x), cos, sin)
        return x + self.mlp(self.pre_mlp_norm(x))


class BareModel(nn.Module):
    """The whole model, or the layers of one pipeline stage: tokens [B, S] or hidden [B, S, H] -> hidden or logits.

    layers: their numbers in the whole model (all by default); first, last: whether it has the embedding, the head.
    """

    def __init__(
        self, sizes: Sizes, layers: Sequence[int] | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        numbers = range(sizes.layers) if layers is None else layers
        words = {"word_embeddings": nn.Embedding(sizes.vocabulary, sizes.hidden)} if first else {}
        self.embedding = nn.ModuleDict(words)
        self.layers = nn.ModuleDict({str(number): Block(sizes) for number in numbers})
        self.final_norm = nn.RMSNorm(sizes.hidden, eps=NORM_EPSILON) if last else None
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False) if last else None
        width = sizes.hidden // sizes.heads
        frequencies = 1.0 / ROTARY_BASE ** (torch.arange(0, width, 2).float() / width)
        angles = torch.arange(sizes.seq_length).float()[:, None] * frequencies  # [S, D/2]
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), dim=-1).sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding:
            x = self.embedding["word_embeddings"](x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        return x if self.lm_head is None else self.lm_head(self.final_norm(x))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, fused as ours is; norms do not decay."""
    norms, matrices = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (False, True))
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": matrices, "weight_decay": WEIGHT_DECAY}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [B, S, V] against labels [B, S], mean over the tokens; scalar."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], microbatches: int
) -> float:
    """The bare loop's step over tokens and labels [M*B, S]: gradients added up over M microbatches, clip, AdamW.

    Returns the mean token loss of the batch.
    """
    loss = 0.0
    for tokens, labels in zip(batch["tokens"].chunk(microbatches), batch["labels"].chunk(microbatches)):
        part = mean_loss(model(tokens), labels) / microbatches
        part.backward()
        loss += part.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def random_batches(sizes: Sizes, global_batch: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """`steps` global batches of random tokens and labels [global_batch, S], the same at every call."""
    generator = torch.Generator().manual_seed(7)
    shape = (2, global_batch, sizes.seq_length)
    draws = [torch.randint(sizes.vocabulary, shape, generator=generator) for _ in range(steps)]
    return [{"tokens": tokens, "labels": labels} for tokens, labels in draws]


def main(sizes: Sizes, given: str | None) -> None:
    """One step, one line; without a file it draws weights and a batch itself, as a hand-written program would."""
    model, batch = BareModel(sizes), random_batches(sizes, sizes.micro_batch, 1)[0]
    if given is not None:
        stored = torch.load(given)
        model.load_state_dict(stored["weights"])
        batch = stored["batch"]
    print(f"loss {train_step(model, build_optimizer(model), batch, 1):.6E}", flush=True)


if __name__ == "__main__":
    main(Sizes(**json.loads(sys.argv[1])), sys.argv[2] if len(sys.argv) > 2 else None)
