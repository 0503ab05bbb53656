"""Folders as they are found: prefixes, old files, damage. And files written tensor by tensor."""

import gc
import json
import shutil
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_lite.config import ConfigError
from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.hugging_face.shards import parse_size, plan_shards, write_shards
from tests.hugging_face.models import saved


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    saved("llama-gqa-tied", folder)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def tensors_of(path):
    return dict(ModelFolder(path).our_tensors())


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_shards_and_bin_files_read_as_one_file(good, tmp_path):
    expected = tensors_of(good)
    weights = load_file(good / "model.safetensors")
    for kind in ("shards", "bin", "bin-shards", "old-bin"):
        (tmp_path / kind).mkdir()
        shutil.copy(good / "config.json", tmp_path / kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(good)
    model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    torch.save(weights, tmp_path / "bin" / "pytorch_model.bin")
    torch.save(weights, tmp_path / "old-bin" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    places = {}
    for number, (name, tensor) in enumerate(weights.items()):
        places[name] = f"part-{number}.bin"
        torch.save({name: tensor}, tmp_path / "bin-shards" / places[name])
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "bin-shards" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for kind in ("shards", "bin", "bin-shards", "old-bin"):
        assert same(tensors_of(tmp_path / kind), expected), kind


def test_a_bare_gpt2_with_tables(tmp_path):
    """The way GPT-2's own files are: no prefix, causal masks among the weights, a copy of the tied head."""
    saved("gpt2-tied", tmp_path)
    expected = tensors_of(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    save_file(bare, tmp_path / "model.safetensors")
    assert same(tensors_of(tmp_path), expected)


def test_half_precision_is_read_without_loss(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in weights.items()}, folder / "model.safetensors")
    seen = tensors_of(folder)["final_norm.weight"]
    assert seen.dtype == torch.float32 and torch.equal(seen, weights["model.norm.weight"].bfloat16().float())


class Planted:
    """Runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return __import__("os").system, (f"touch {self.mark}",)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def planted(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"x": Planted(folder / "ran")}, folder / "pytorch_model.bin")


def indexed(folder, places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


DAMAGE = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read: No such file"),
    "cut": (truncate, "not a whole safetensors file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "not a whole safetensors file"),
    "missing": (
        lambda f: change_weights(f, lambda w: w.pop("model.norm.weight")),
        "lacks 1 tensors of the model, the first is model.norm.weight",
    ),
    "extra": (
        lambda f: change_weights(
            f, lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
        ),
        "has 1 tensors that the model of its config.json has not, the first is model.layers.0.self_attn.q_norm",
    ),
    "shape": (
        lambda f: change_weights(f, lambda w: w.update({"model.norm.weight": torch.ones(31)})),
        r"model.norm.weight has shape \[31\], by config.json it is \[32\]",
    ),
    "untied": (
        lambda f: change_weights(f, lambda w: w.update({"lm_head.weight": torch.ones(61, 32)})),
        "ties the head to the embedding, but",
    ),
    "planted": (planted, "weights_only"),
    "text": (lambda f: (f / "pytorch_model.bin.index.json").write_text("<html>"), "it is an HTML"),
    "outside": (lambda f: indexed(f, {"model.norm.weight": "../model.safetensors"}), "in the same folder"),
    "absent file": (lambda f: indexed(f, {"model.norm.weight": "a.safetensors"}), "does not exist"),
    "wrong file": (lambda f: indexed(f, {"nothing": "model.safetensors"}), "looks for nothing in"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_sentence(folder, case):
    damage, words = DAMAGE[case]
    damage(folder)
    with pytest.raises(ConfigError, match=words) as caught:
        tensors_of(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: w["model.norm.weight"].fill_(float("nan")),
            "model.norm.weight has 32 values that are not",
        ),
        (lambda w: w.update({"model.norm.weight": torch.ones(32).to(torch.int8)}), "is torch.int8, wanted"),
    ],
)
def test_weights_that_are_none_are_refused(folder, change, says):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=says):
        list(ModelFolder(folder).our_tensors())


def test_more_layers_than_tensors_are_refused_before_a_model_is_built(folder):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 10**9}))
    with pytest.raises(ConfigError, match="too few for 1,000,000,000 layers"):
        ModelFolder(folder)


def test_written_files_are_safetensors(tmp_path):
    """Read by the library itself; no tensor is split, none is asked for twice."""
    generator = torch.Generator().manual_seed(1)
    tensors = {f"t{i}": torch.randn(i + 1, 7, generator=generator) for i in range(9)}
    tensors["empty"] = torch.zeros(0, 3)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    asked = []

    def read(name):
        asked.append(name)
        return tensors[name]

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        total = write_shards(folder, shapes, dtype, 300, read)
        files = sorted(folder.glob("*.safetensors"))
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert (
            index["metadata"]["total_size"]
            == total
            == sum(t.numel() for t in tensors.values()) * dtype.itemsize
        )
        seen = {}
        for file in files:
            content = load_file(file)
            assert all(index["weight_map"][name] == file.name for name in content)
            seen |= content
        assert same(seen, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    assert asked == list(tensors) * 3


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    given = []

    def read(name):
        gc.collect()
        assert sum(old() is not None for old in given) <= 1, f"others are still held when {name} is read"
        tensor = torch.zeros(50, 7)
        given.append(weakref.ref(tensor))
        return tensor

    write_shards(tmp_path, {f"t{i}": (50, 7) for i in range(6)}, torch.float32, 10**6, read)
    assert len(given) == 6


def test_plan_of_shards():
    shapes = {"a": (10,), "b": (10,), "c": (100,), "d": (5,)}
    assert plan_shards(shapes, torch.float32, 80) == [["a", "b"], ["c"], ["d"]]
    assert plan_shards(shapes, torch.float32, 10**9) == [["a", "b", "c", "d"]]


def test_sizes():
    assert [parse_size(text, "-") for text in ("5GB", "500 MiB", "1.5kb", "77")] == [
        5 * 10**9,
        500 * 2**20,
        1500,
        77,
    ]
    for text in ("", "5XB", "-1GB", "0GB", "GB"):
        with pytest.raises(ConfigError, match="--max-shard-size is"):
            parse_size(text, "--max-shard-size")
