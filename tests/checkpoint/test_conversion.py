"""--ckpt-convert-format: the same tensors in another form."""

import pytest
import torch

from megatron_lite.checkpoint.conversion import convert_checkpoint
from megatron_lite.checkpoint.reading import CheckpointReader
from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import CheckpointConfig, ConfigError

TENSORS = {
    "final_norm.weight": torch.arange(4.0),
    "optimizer.exp_avg.final_norm.weight": torch.ones(4),
    "random_state.pp0.cpu": torch.zeros(9, dtype=torch.uint8),
}


@pytest.fixture
def load(tmp_path):
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(b"tokens")
    state = {"consumed_samples": 80, "layout": {"pp": 1}}
    write_checkpoint(
        str(tmp_path / "run"), 10, TENSORS.items(), {"model": {"num_layers": 1}}, state, [tokenizer]
    )
    return str(tmp_path / "run")


def convert(load, to, form, **flags):
    return convert_checkpoint(
        CheckpointConfig(load=load, ckpt_convert_format=form, ckpt_convert_save=str(to), **flags)
    )


def test_to_a_folder(load, tmp_path):
    path = convert(load, tmp_path / "new", "torch_dist")
    with CheckpointReader(str(tmp_path / "new")) as reader:
        assert reader.path == path
        assert sorted(reader.names()) == ["final_norm.weight", "optimizer.exp_avg.final_norm.weight"]
        assert all(torch.equal(reader.read(name), TENSORS[name]) for name in reader.names())
        assert reader.config == {"model": {"num_layers": 1}}
        assert reader.train_state == {"consumed_samples": 80, "iteration": 10}
    assert (tmp_path / "new" / "iter_0000010" / "tokenizer" / "tokenizer.model").read_bytes() == b"tokens"


def test_only_the_weights(load, tmp_path):
    convert(load, tmp_path / "new", "torch_dist", no_load_optim=True)
    with CheckpointReader(str(tmp_path / "new")) as reader:
        assert list(reader.names()) == ["final_norm.weight"]
        assert reader.train_state["weights_only"] is True


def test_to_one_file(load, tmp_path):
    path = convert(load, tmp_path / "new", "torch")
    assert path == str(tmp_path / "new" / "iter_0000010.pt")
    content = torch.load(path, weights_only=True)
    assert content["iteration"] == 10 and content["config"] == {"model": {"num_layers": 1}}
    assert torch.equal(content["tensors"]["final_norm.weight"], TENSORS["final_norm.weight"])
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["iter_0000010.pt"]


def test_errors(load, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        convert(str(tmp_path / "empty"), tmp_path / "new", "torch")
    for form in ("torch", "torch_dist"):
        with pytest.raises(ConfigError, match="file cannot be written"):
            convert(load, tmp_path / "file", form)


@pytest.mark.parametrize(
    "place", ["run", "run/", "run/../run", "link", "run/iter_0000010", "run/iter_0000010/new"]
)
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_conversion_never_replaces_its_source(load, tmp_path, place, form):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    for start in ("", "file://"):
        with pytest.raises(ConfigError, match="wanted another folder: it would be replaced"):
            convert(load, f"{start}{tmp_path}/{place}", form)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_conversion_never_replaces_another(load, tmp_path, form):
    convert(load, tmp_path / "new", form)
    with pytest.raises(ConfigError, match="new holds iter_0000010.*, wanted a folder without it"):
        convert(load, tmp_path / "new", form)
