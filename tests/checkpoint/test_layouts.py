"""A checkpoint of any layout loads in any other: real model chunks and optimizer state on four ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_lite.checkpoint.reading import CheckpointReader
from megatron_lite.checkpoint.shards import shard_of
from megatron_lite.config import CheckpointConfig
from megatron_lite.rehearsal.one_process import initial_model
from megatron_lite.training.named_tensors import checkpoint_tensors, tied_copies
from tests.parity import full, make_config, set_up
from tests.ranks import run_ranks

TIED = {"untie_embeddings_and_output_weights": False, "padded_vocab_size": 61, "num_layers": 4}
EXPERTS = {
    "num_layers": 4,
    "num_experts": 6,  # over four ranks: uneven
    "moe_ffn_hidden_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_layer_freq": (0, 1, 1, 1),
}
EXPERT_BIAS = torch.arange(6.0) / 8
UNTIED = {"padded_vocab_size": 61, "num_layers": 4}  # one layer a rank with pp 4
# The padded vocabulary, 61, is divisible by nothing: FSDP's last rank holds fewer rows. (Tensor parallelism
# splits the vocabulary evenly or not at all; it gets 64.)
LAYOUTS = {
    "fsdp": {"dp": 4},
    "pipeline": {"pp": 4},
    "interleaved": {"pp": 2, "chunks": 2, "dp": 2},
    "hsdp": {"dp": 4, "num_distributed_optimizer_instances": 2},
    "context": {"dp": 2, "cp": 2},
}


def weights_of(config):
    """{name: whole initial weight}, from a model that was never split."""
    return {name: p.detach().clone() for name, p in initial_model(config).named_global_parameters()}


def whole_state(config):
    """What the checkpoint must hold: weights, buffers, and optimizer state as elementwise functions of weights."""
    state = {name: EXPERT_BIAS for name, _ in initial_model(config).named_global_buffers()}
    for name, weight in weights_of(config).items():
        state |= {name: weight, f"optimizer.exp_avg.{name}": 2 * weight + 1}
        state |= {
            f"optimizer.exp_avg_sq.{name}": weight * weight,
            f"optimizer.step.{name}": torch.tensor(7.0),
        }
    return state


class Side:
    """My rank's chunks, optimizer and checkpointer in one layout."""

    def __init__(self, config):
        run = set_up(config)
        self.mesh, self.chunks, self.optimizer = run.mesh, run.chunks, run.optimizer
        self.checkpointer = run.checkpointer()

    def tensors(self):
        return checkpoint_tensors(self.chunks, self.optimizer)

    def copies(self):
        return tied_copies(self.chunks, self.optimizer)

    @torch.no_grad()
    def fill(self):
        tensors = self.tensors() | self.copies()
        for name, tensor in tensors.items():
            if name.endswith("expert_bias"):
                tensor.copy_(EXPERT_BIAS)
            elif name.startswith("optimizer.step."):
                tensor.fill_(7.0)
            elif name.startswith("optimizer.exp_avg."):
                tensor.copy_(2 * tensors[name.removeprefix("optimizer.exp_avg.")] + 1)
            elif name.startswith("optimizer.exp_avg_sq."):
                tensor.copy_(tensors[name.removeprefix("optimizer.exp_avg_sq.")] ** 2)

    @torch.no_grad()
    def wipe(self):
        for tensor in (self.tensors() | self.copies()).values():
            tensor.fill_(-1)

    def load(self):
        found = self.checkpointer.find()
        self.checkpointer.load(found, self.tensors())
        self.checkpointer.load(found, self.copies())
        return found


def _round(configs, folder, every_pair=False):
    """Save in each layout; load in the same, in the next one, or in all. Returns how many tensors were checked."""
    torch.manual_seed(dist.get_rank())
    checked = 0
    for number, saved in enumerate(configs):
        save = f"{folder}/{number}"
        side = Side(replace(saved, checkpoint=CheckpointConfig(save=save)))
        side.fill()
        mine = torch.get_rng_state()
        side.checkpointer.save(3, side.tensors(), {"consumed_samples": 12}, {"cpu": mine})
        for loaded in configs if every_pair else (saved, configs[(number + 1) % len(configs)]):
            other = Side(replace(loaded, checkpoint=CheckpointConfig(load=save)))
            other.wipe()
            found = other.load()
            expected = whole_state(loaded)
            for name, tensor in (other.tensors() | other.copies()).items():
                assert torch.equal(full(tensor), expected[name]), (
                    f"{saved.parallel} to {loaded.parallel}: {name}"
                )
                checked += 1
            assert other.checkpointer.read_train_state(found)["consumed_samples"] == 12
            kept = other.checkpointer.load_rank_state(found)
            if saved == loaded:
                assert torch.equal(kept["cpu"], mine)
            else:
                assert kept is None
    return checked


@pytest.mark.slow
def test_every_pair_of_layouts(tmp_path):
    configs = [make_config(model=UNTIED, **layout) for layout in LAYOUTS.values()]
    configs += [
        make_config(tp=2, dp=2, model={"num_layers": 4}),
        make_config(tp=2, pp=2, model={"num_layers": 4}),
    ]
    assert all(run_ranks(_round, 4, configs[:5], str(tmp_path), True, init=True, timeout=300))
    configs = [make_config(dp=4, model={"num_layers": 4}), *configs[5:]]
    assert all(run_ranks(_round, 4, configs, str(tmp_path), True, init=True, timeout=300))


@pytest.mark.parametrize(
    "layouts, model",
    [
        (("fsdp", "pipeline", "hsdp", "interleaved"), UNTIED),
        (("fsdp", "interleaved"), TIED),
        (("fsdp", "pipeline", "context"), EXPERTS),
    ],
    ids=["untied", "tied", "experts"],
)
def test_one_layout_to_another(tmp_path, layouts, model):
    configs = [make_config(model=model, **LAYOUTS[name]) for name in layouts]
    assert all(run_ranks(_round, 4, configs, str(tmp_path), init=True))
    expected = whole_state(configs[0])
    for number in range(len(configs)):  # and in one process, by our reader and by torch's own
        reader = CheckpointReader(f"{tmp_path}/{number}")
        assert set(reader.names()) - set(expected) == {
            n for n in reader.names() if n.startswith("random_state.")
        }
        assert sorted(reader.weight_names()) == sorted(n for n in expected if not n.startswith("optimizer."))
        theirs = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        dcp.load(theirs, checkpoint_id=reader.path, no_dist=True)
        for name, tensor in expected.items():
            assert torch.equal(reader.read(name), tensor), name
            assert torch.equal(theirs[name], tensor), name


def test_tensor_parallel_and_back(tmp_path):
    model = {"num_layers": 2}
    configs = [make_config(tp=2, dp=2, model=model), make_config(dp=4, model=model)]
    assert all(run_ranks(_round, 4, configs, str(tmp_path), init=True))


def _other_padding(folder):
    """Saved with 61 rows (59 tokens) over dp 2, loaded with 64 over tp 2, saved, loaded with 60 over dp 2."""
    rows = {}
    for number, (padded, layout) in enumerate(((61, {"dp": 2}), (64, {"tp": 2}), (60, {"dp": 2}))):
        model = UNTIED | {"padded_vocab_size": padded}
        place = CheckpointConfig(save=f"{folder}/{number}", load=f"{folder}/{number - 1}" if number else None)
        side = Side(replace(make_config(model=model, **layout), checkpoint=place))
        side.load() if number else side.fill()
        side.checkpointer.save(3, side.tensors(), {}, {})
        rows[padded] = {name: full(t) for name, t in side.tensors().items() if t.dim()}
    return rows


def test_rows_behind_the_vocabulary_may_be_more_or_fewer(tmp_path):
    for rows in run_ranks(_other_padding, 2, str(tmp_path), init=True):
        assert rows[61].keys() == rows[64].keys() == rows[60].keys()
        for name, tensor in rows[61].items():
            padded = name.endswith(("word_embeddings.weight", "lm_head.weight"))
            for other in (rows[64][name], rows[60][name]):
                assert torch.equal(other[:59], tensor[:59]) if padded else torch.equal(other, tensor), name


def _hand_made_shards():
    """Shards by our rule against the rows DTensor itself scatters, for placements that FSDP over TP makes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(7 * 6).view(7, 6)
    for placements in (
        [Shard(0), Shard(0)],
        [Shard(1), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
    ):
        shard = shard_of(distribute_tensor(whole, mesh, placements))
        part = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes))
        assert torch.equal(shard.local, whole[part]), placements
    # distribute_tensor cannot make a strided shard: FSDP makes it by cutting tensor parallelism's own shard.
    dp, tp = mesh.get_coordinate()
    mine = whole.chunk(2, dim=0)[tp].chunk(2, dim=0)[dp]
    tensor = torch.distributed.tensor.DTensor.from_local(
        mine, mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False, shape=(7, 6), stride=(6, 1)
    )
    shard = shard_of(tensor)
    start = shard.offsets[0]
    assert torch.equal(whole[start : start + shard.sizes[0]], mine)
    return True


def test_shards_are_the_slices_that_dtensor_makes():
    assert all(run_ranks(_hand_made_shards, 4, init=True))


def _errors(config, folder):
    config = replace(config, checkpoint=CheckpointConfig(save=folder, load=folder))
    side = Side(config)
    side.checkpointer.save(1, side.tensors(), {}, {})
    found = side.checkpointer.find()
    messages = []
    # Only one rank asks for what is not there; every rank has to hear of it, or the others hang.
    extra = {"layers.99.not_there": torch.zeros(1)} if dist.get_rank() == 1 else {}
    wrong = {"final_norm.weight": torch.zeros(5)} if dist.get_rank() == 0 else {}
    rounded = {"final_norm.weight": torch.zeros(32, dtype=torch.bfloat16)} if dist.get_rank() == 1 else {}
    for tensors in (extra, wrong, rounded):
        try:
            side.checkpointer.load(found, tensors)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_does_not_fit_is_listed_on_every_rank(tmp_path):
    for messages in run_ranks(_errors, 2, make_config(dp=2, model=UNTIED), str(tmp_path), init=True):
        missing, shape, dtype = messages
        assert missing == f"{tmp_path}/iter_0000001 holds no layers.99.not_there"
        assert shape == f"{tmp_path}/iter_0000001 does not fit: final_norm.weight is [32], wanted [5]"
        assert dtype.endswith("final_norm.weight is float32, wanted bfloat16")
