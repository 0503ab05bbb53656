"""Checkpoints that megatron-core wrote, against the logits that megatron-core computed (see make_files.py)."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lite.config import ConfigError, ModelConfig
from megatron_lite.files.command_line import run
from megatron_lite.hugging_face.checkpoint_model import CheckpointModel
from megatron_lite.megatron_checkpoint.weights import open_megatron, our_tensors, with_stored_vocabulary
from megatron_lite.model.gpt import load_chunk
from tools import megatron_import

FILES = Path(__file__).parent / "files"
FLAGS = """
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --kv-channels 4 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
"""
EXTRA = {
    "dist_gqa": "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
    "dist_tied_tp2": "",
    "legacy_gqa_tp2": "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
}
EXPERTS = f"{EXTRA['dist_gqa']} --num-experts 4 --moe-ffn-hidden-size 8 --moe-router-topk 2"
EXTRA |= {
    "dist_experts": EXPERTS,
    "dist_experts_ep2": EXPERTS,
    "dist_experts_pattern": f"""{EXPERTS} --moe-layer-freq [0,1] --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate
        --moe-router-topk-scaling-factor 1.5""",
}


def call(argv, capsys):
    before, sys.argv = sys.argv, ["tool", *map(str, argv)]
    try:
        with pytest.raises(SystemExit) as leave:
            run(megatron_import.main)
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return leave.value.code, out, err


@pytest.mark.parametrize("name", EXTRA)
def test_logits_are_those_of_megatron_core(name, tmp_path, capsys):
    argv = ["--megatron-checkpoint", FILES / name, "--save", tmp_path / "ck", "--max-position-embeddings", 32]
    code, out, err = call([*argv, "--vocab-size", 37, *FLAGS.split(), *EXTRA[name].split()], capsys)
    assert code == 0 and "vocabulary 37 of 40 rows" in out, err
    source = CheckpointModel(str(tmp_path / "ck"))
    assert source.train_state["weights_only"]
    model = load_chunk(source.config.model, range(2), source.read)
    expected = torch.load(FILES / f"{name}.pt", weights_only=True)
    seen = model(expected["tokens"])
    assert expected["logits"].std() > 0.2
    torch.testing.assert_close(seen, expected["logits"], rtol=1e-4, atol=1e-5)


class Renamed:
    """A checkpoint whose experts are tensors of their own, gate and up too, as singleton_local_shards writes them."""

    def __init__(self, source, halves):
        self.path, self.halves, self._source = source.path, halves, source

    def shape(self, name):
        found = self._find(name)
        return None if found is None else tuple(found.shape)

    def read(self, name):
        assert self._find(name) is not None, name
        return self._find(name)

    def _find(self, name):
        at, _, rest = name.partition("experts.experts.")
        if not rest:
            return self._source.read(name) if self._source.shape(name) else None
        number, _, kind = rest.partition(".")
        if not number.isdigit():
            return None
        half = kind[-1] if kind.endswith(("_w", "_v")) else ""
        if (half != "") != (self.halves and "fc1" in kind):
            return None
        whole = self._source.read(f"{at}experts.experts.{kind.removesuffix(f'_{half}')}")[int(number)]
        return whole.chunk(2)["wv".index(half)] if half else whole


@pytest.mark.parametrize("halves", [False, True])
def test_experts_in_tensors_of_their_own(halves):
    source = open_megatron(FILES / "dist_experts", 5, gated=True)
    model = with_stored_vocabulary(
        replace(flags_of("dist_gqa"), num_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2), source
    )
    one, other = dict(our_tensors(source, model)), dict(our_tensors(Renamed(source, halves), model))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert one["layers.1.mlp.experts.up_proj.weight"].shape == (4, 8, 16)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("dist_experts", "--num-experts 5", "comes out as [4, 16], by the flags of the model it is [5, 16]"),
        (
            "dist_experts",
            "--moe-ffn-hidden-size 12",
            "comes out as [4, 8, 16], by the flags of the model it is [4, 12, 16]",
        ),
        ("dist_gqa", "--num-experts 4", "holds no decoder.layers.0.mlp.router.weight"),
        ("legacy_gqa_tp2", "--num-experts 4", "holds no decoder.layers.0.mlp.router.weight"),
        ("dist_experts_pattern", "--moe-layer-freq 1", "holds no decoder.layers.0.mlp.router.weight"),
    ],
)
def test_another_mixture_than_the_checkpoint_holds(name, more, words, tmp_path, capsys):
    argv = ["--megatron-checkpoint", FILES / name, "--save", tmp_path / "ck", "--max-position-embeddings", 32]
    code, _, err = call([*argv, *FLAGS.split(), *EXTRA[name].split(), *more.split()], capsys)
    assert code == 2 and words in err and err.count("\n") == 1, err
    assert not (tmp_path / "ck").exists()


def test_pipeline_ranks_are_joined(tmp_path):
    """Files as Megatron-LM names and cuts them for two pipeline ranks: layers are counted from 0 on each."""
    for tensor in (0, 1):
        file = FILES / "legacy_gqa_tp2" / "iter_0000005" / f"mp_rank_{tensor:02d}" / "model_optim_rng.pt"
        whole = torch.load(file, weights_only=False)
        for stage in (0, 1):
            part = {}
            for name, value in whole["model"].items():
                layer = name.startswith("decoder.layers.")
                if layer and name.startswith(f"decoder.layers.{stage}."):
                    part[name.replace(f"layers.{stage}.", "layers.0.")] = value
                elif not layer and name.startswith("embedding") == (stage == 0):
                    part[name] = value
            folder = tmp_path / "iter_0000005" / f"mp_rank_{tensor:02d}_{stage:03d}"
            folder.mkdir(parents=True)
            torch.save({"model": part, "args": whole["args"]}, folder / "model_optim_rng.pt")
    model = flags_of("legacy_gqa_tp2")
    joined = open_megatron(tmp_path / "iter_0000005", None, gated=True)
    one = open_megatron(FILES / "legacy_gqa_tp2", 5, gated=True)
    model = with_stored_vocabulary(model, one)
    for (name, a), (_, b) in zip(our_tensors(joined, model), our_tensors(one, model), strict=True):
        assert torch.equal(a, b), name


def flags_of(name):
    return ModelConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        max_position_embeddings=32,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights="tied" not in name,
    )


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return __import__("os").system, (f"touch {self.mark}",)


def test_a_planted_file_runs_nothing(tmp_path):
    folder = tmp_path / "iter_0000001" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": {"x": Planted(tmp_path / "ran")}}, folder / "model_optim_rng.pt")
    source = open_megatron(tmp_path / "iter_0000001", None, gated=True)
    with pytest.raises(ConfigError, match="no GPT model of megatron-core"):
        with_stored_vocabulary(flags_of("x"), source)
    assert not (tmp_path / "ran").exists()


def test_errors_are_one_sentence(tmp_path, capsys):
    good = FILES / "dist_gqa"
    flags = [*FLAGS.split(), *EXTRA["dist_gqa"].split()]
    cut = shutil.copytree(good, tmp_path / "cut") / "iter_0000005" / "__0_0.distcp"
    cut.write_bytes(cut.read_bytes()[:2000])
    (tmp_path / "empty").mkdir()
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / "latest_checkpointed_iteration.txt").write_text("9")
    for folder, more, words in (
        (tmp_path / "nothing", [], "is not a folder"),
        (tmp_path / "empty", [], "neither .metadata (torch_dist) nor mp_rank_*"),
        (tmp_path / "points", [], "iter_0000009 does not exist"),
        (tmp_path / "cut", [], "__0_0.distcp"),
        (good, ["--ckpt-step", 7], "iter_0000007 does not exist"),
        (good, ["--vocab-size", 41], "--vocab-size is 41, the checkpoint's embedding has 40 rows"),
        (good, ["--hidden-size", 20], "comes out as"),
        (good, ["--num-layers", 3], "holds no decoder.layers.2"),
        (good, ["--no-such-flag"], "--no-such-flag"),
    ):
        argv = ["--megatron-checkpoint", folder, "--save", tmp_path / "ck", "--max-position-embeddings", 32]
        code, _, err = call([*argv, *flags, *more], capsys)
        assert code == 2 and words in err and err.count("\n") == 1, (folder, more, err)
        assert not (tmp_path / "ck").exists()
