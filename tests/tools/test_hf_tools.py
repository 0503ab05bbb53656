"""hf_import, hf_export and generate as a user runs them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_lite.checkpoint.reading import CheckpointReader
from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import Config, DataConfig, ModelConfig
from megatron_lite.files.command_line import run
from megatron_lite.hugging_face import conversions, verification, weights
from megatron_lite.model.gpt import parameter_shapes
from tests import local_tokenizers
from tests.hugging_face.models import VOCAB, build, random_tokens, saved
from tests.hugging_face.test_mixtures import CASES as MIXTURES
from tests.hugging_face.test_mixtures import saved as saved_mixture
from tools import generate, hf_export, hf_import

ROOT = Path(__file__).parents[2]


def call(tool, *argv, capsys=None):
    """Run a tool's main as its file does; returns (exit code, stdout, stderr)."""
    before, sys.argv = sys.argv, ["tool", *map(str, argv)]
    try:
        with pytest.raises(SystemExit) as leave:
            run(tool.main)
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return leave.value.code, out, err


def test_a_model_comes_back_bit_by_bit(tmp_path, capsys):
    saved("qwen3-gqa-untied", tmp_path / "hf")
    argv = ("--hf-model", tmp_path / "hf", "--save", tmp_path / "ck", "--make-vocab-size-divisible-by", 16)
    code, out, _ = call(hf_import, *argv, capsys=capsys)
    assert code == 0 and "verified: random tokens: 128 positions, largest difference" in out
    assert "config.json: rms_norm_eps = 2e-05" in out
    reader = CheckpointReader(str(tmp_path / "ck"))
    assert reader.config["model"]["qk_layernorm"] and reader.config["model"]["vocab_size"] == VOCAB
    assert reader.names()["lm_head.weight"].shape[0] == 64 and reader.train_state["weights_only"]
    code, out, _ = call(
        hf_export,
        "--load",
        tmp_path / "ck",
        "--output",
        tmp_path / "out",
        "--max-shard-size",
        "20KB",
        capsys=capsys,
    )
    assert code == 0 and "-> Qwen3ForCausalLM" in out and "verified: random tokens" in out
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    seen = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in seen)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "hf", "out"], "nothing half-made stays"


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_comes_back_bit_by_bit(name, tmp_path, capsys):
    saved_mixture(name, tmp_path / "hf")
    argv = ("--hf-model", tmp_path / "hf", "--save", tmp_path / "ck")
    code, out, err = call(hf_import, *argv, capsys=capsys)
    assert code == 0 and "verified: random tokens" in out, err
    argv = ("--load", tmp_path / "ck", "--output", tmp_path / "out", "--max-shard-size", "20KB")
    code, out, err = call(hf_export, *argv, capsys=capsys)
    assert code == 0 and "verified: random tokens" in out, err
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    seen = {key: tensor for file in files for key, tensor in load_file(file).items()}
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    assert len(files) > 3 and seen.keys() == expected.keys()
    assert all(torch.equal(seen[key], expected[key]) for key in seen)


def test_a_public_mixture_is_trained_on_over_ranks_and_leaves_in_bf16(tmp_path, capsys):
    """Its expert bias moves, and stays fp32 in the file, which transformers loads and writes on from."""
    saved_mixture("glm4_moe-groups", tmp_path / "hf")
    call(hf_import, "--hf-model", tmp_path / "hf", "--save", tmp_path / "ck", capsys=capsys)
    words = f"""--load {tmp_path}/ck --use-checkpoint-args --finetune --save {tmp_path}/run --train-iters 2 --mock-data
        --seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --tokenizer-type NullTokenizer
        --vocab-size 60 --expert-model-parallel-size 2 --moe-router-bias-update-rate 0.125 --bf16 --eval-iters 0
        --distributed-timeout-minutes 2 --num-workers 0 --device cpu"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "pretrain_gpt.py", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    argv = ("--load", tmp_path / "run", "--output", tmp_path / "out", "--dtype", "bf16")
    code, out, err = call(hf_export, *argv, capsys=capsys)
    assert code == 0 and "-> Glm4MoeForCausalLM" in out and "verified" in out, err
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "out"))
    assert after[name].dtype == torch.float32 and after["model.norm.weight"].dtype == torch.bfloat16
    moved = (after[name] - before[name]).abs()
    assert moved.max() == pytest.approx(0.25) and moved.sum() > 0.5
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    written = theirs.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    argv = (
        "--load",
        tmp_path / "run",
        "--prompt",
        "5 6 7",
        "--max-new-tokens",
        6,
        "--ignore-eod",
        "--dtype",
        "bf16",
    )
    code, out, err = call(generate, *argv, capsys=capsys)
    assert code == 0 and len(out.split()) == 9 and len(written[0]) == 9, out + err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint as training writes it: tied, padded vocabulary, a SentencePiece tokenizer beside the weights."""
    folder = tmp_path_factory.mktemp("run")
    data = DataConfig(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=str(local_tokenizers.write_sentencepiece(folder / "t.model")),
        seq_length=32,
        data_path=("0.5", "/somewhere/books_text_document"),
    )
    size = local_tokenizers.build_tokenizer(data).vocab_size
    model = ModelConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=8,
        max_position_embeddings=64,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        vocab_size=size,
        padded_vocab_size=size + 27,
    )
    generator = torch.Generator().manual_seed(1)
    tensors = [(n, 0.3 * torch.randn(s, generator=generator)) for n, s in parameter_shapes(model).items()]
    state = {"consumed_samples": 160, "consumed_tokens": 5120}
    config = Config(model=model, data=data).to_dict()
    write_checkpoint(str(folder / "ck"), 10, tensors, config, state, [folder / "t.model"])
    write_checkpoint(
        str(folder / "ck"), 20, [(n, 2 * t) for n, t in tensors], config, state, [folder / "t.model"]
    )
    (folder / "t.model").unlink()  # the checkpoint has its own copy
    return folder / "ck", model, dict(tensors)


def test_export_of_a_run(trained, tmp_path, capsys):
    checkpoint, model, tensors = trained
    output = tmp_path / "hf"
    argv = ("--load", checkpoint, "--ckpt-step", 10, "--output", output, "--dtype", "bf16")
    code, out, _ = call(hf_export, *argv, capsys=capsys)
    assert code == 0 and "equal to AutoTokenizer's" in out
    assert "verified: random tokens" in out and "verified: real text" in out
    names = {p.name for p in output.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    }
    stored = load_file(output / "model.safetensors")
    assert "lm_head.weight" not in stored, "a tied head is stored once"
    embedding = stored["model.embed_tokens.weight"]
    assert embedding.dtype == torch.bfloat16 and embedding.shape == (model.vocab_size, 32)
    assert torch.equal(embedding, tensors["embedding.word_embeddings.weight"][: model.vocab_size].bfloat16())
    card = (output / "README.md").read_text()
    assert (
        "iteration 10" in card
        and "5,120" in card
        and "books_text_document" in card
        and "/somewhere" not in card
    )
    assert json.loads((output / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    loaded = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and loaded.dtype == torch.bfloat16
    theirs = loaded.float().generate(
        **tokenizer("The quick", return_tensors="pt"), max_new_tokens=6, do_sample=False, eos_token_id=-1
    )
    code, out, _ = call(
        generate,
        "--hf-model",
        output,
        "--prompt",
        "The quick",
        "--max-new-tokens",
        6,
        "--ignore-eod",
        capsys=capsys,
    )
    assert code == 0 and out.rstrip("\n") == tokenizer.decode(theirs[0]).rstrip("\n")


def test_generate_from_a_checkpoint(trained, capsys):
    checkpoint, _, _ = trained
    common = ("--load", checkpoint, "--max-new-tokens", 5, "--prompt", "def f", "The lazy")
    code, out, _ = call(generate, *common, capsys=capsys)
    assert code == 0 and out.startswith("def f") and "The lazy" in out
    sampled = ("--temperature", 1.5, "--top-k", 40, "--top-p", 0.95, "--num-samples", 2)
    runs = [call(generate, *common, *sampled, "--seed", seed, capsys=capsys)[1] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    # Near to 0 a temperature takes the most likely token, however small it is.
    assert call(generate, *common, "--temperature", "1e-40", capsys=capsys)[1] == out
    for flags, words in (
        (("--temperature", 1, "--top-p", 0), "--top-p: is '0', wanted a number from 1e-06 to 1"),
        (("--temperature", "inf"), "--temperature: is 'inf', wanted a number of at least 0"),
        (("--seed", 10**30), "--seed: is '1"),
        (("--device", "cuda"), "--device is cuda, but torch finds no CUDA device"),
    ):
        if flags == ("--device", "cuda") and torch.cuda.is_available():
            continue
        code, _, err = call(generate, *common, *flags, capsys=capsys)
        assert code == 2 and err.startswith(f"error: {words}") and err.count("\n") == 1


def test_a_wrong_conversion_keeps_nothing(trained, tmp_path, capsys, monkeypatch):
    """Two matrices swapped on the way: the tool has to notice, say how far off it is, and leave with 1."""
    checkpoint, _, _ = trained
    original = weights.tensor_maps

    def swapped(*arguments):
        maps = original(*arguments)
        names = [entry.ours for entry in maps]
        a, b = names.index(("layers.0.mlp.gate_proj.weight",)), names.index(("layers.0.mlp.up_proj.weight",))
        maps[a], maps[b] = (
            weights.TensorMap(maps[a].theirs, maps[b].ours),
            weights.TensorMap(maps[b].theirs, maps[a].ours),
        )
        return maps

    monkeypatch.setattr(conversions, "tensor_maps", swapped)
    code, out, err = call(hf_export, "--load", checkpoint, "--output", tmp_path / "hf", capsys=capsys)
    assert code == 1 and "DIFFERENT: random tokens" in out and "nothing was kept" in err
    assert not list(tmp_path.iterdir())
    code, _, _ = call(
        hf_export, "--load", checkpoint, "--output", tmp_path / "hf", "--no-verify", capsys=capsys
    )
    assert code == 0


def test_a_wrong_import_keeps_nothing(tmp_path, capsys, monkeypatch):
    saved("llama-gqa-untied", tmp_path / "hf")
    theirs = verification.their_logits
    monkeypatch.setattr(verification, "their_logits", lambda *a: [1.01 * logits for logits in theirs(*a)])
    code, out, err = call(hf_import, "--hf-model", tmp_path / "hf", "--save", tmp_path / "ck", capsys=capsys)
    assert code == 1 and "DIFFERENT" in out and err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_folder_with_a_tokenizer_there_and_back(tmp_path, capsys):
    """Ids, special tokens and files of the tokenizer survive import and export."""
    local_tokenizers.write_byte_level(tmp_path / "hf")
    size = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]["vocab"]
    model = build("llama-gqa-tied", vocab_size=len(size), eos_token_id=0, bos_token_id=None)
    model.save_pretrained(tmp_path / "hf")
    code, out, _ = call(hf_import, "--hf-model", tmp_path / "hf", "--save", tmp_path / "ck", capsys=capsys)
    assert code == 0 and "tokenizer HuggingFaceTokenizer" in out and "verified: real text" in out
    shutil.move(tmp_path / "hf", tmp_path / "moved")
    code, out, _ = call(hf_export, "--load", tmp_path / "ck", "--output", tmp_path / "out", capsys=capsys)
    assert code == 0 and "equal to AutoTokenizer's" in out
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "moved" / name).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0
    tokens = random_tokens(vocab=len(size))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)


def hostile(folder):
    """One wrong thing a case: (tool, argv, words of the sentence)."""
    saved("llama-gqa-untied", folder / "good")
    (folder / "taken").mkdir()
    (folder / "taken" / "file").write_text("x")
    content = json.loads((folder / "good" / "config.json").read_text())
    cases = {
        "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": None},
        "mamba": {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "conflict": {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 8.0}},
    }
    for name, changes in cases.items():
        shutil.copytree(folder / "good", folder / name)
        (folder / name / "config.json").write_text(json.dumps(content | changes))
    shutil.copytree(folder / "good", folder / "page")
    (folder / "page" / "config.json").write_text("\ufeff<?xml version='1.0'?><Error/>")
    new = folder / "new"
    return [
        (hf_import, ("--hf-model", folder / "nothing", "--save", new), "is not a folder"),
        (hf_import, ("--hf-model", folder / "yarn", "--save", new), "rope_type = 'yarn'"),
        (hf_import, ("--hf-model", folder / "mamba", "--save", new), "MambaForCausalLM"),
        (hf_import, ("--hf-model", folder / "conflict", "--save", new), "rope_theta is 7.0"),
        (hf_import, ("--hf-model", folder / "page", "--save", new), "it is an XML page"),
        (
            hf_import,
            ("--hf-model", folder / "good", "--save", folder / "taken"),
            "exists and is not an empty folder",
        ),
        (hf_import, ("--hf-model", folder / "good"), "--save"),
        (hf_export, ("--load", folder / "good", "--output", new), "checkpoint"),
        (
            hf_export,
            ("--load", folder / "good", "--output", folder / "taken"),
            "exists and is not an empty folder",
        ),
        (hf_export, ("--load", "x", "--output", new, "--max-shard-size", "big"), "--max-shard-size is 'big'"),
        (generate, ("--prompt", "x"), "one of --load and --hf-model"),
        (generate, ("--hf-model", folder / "good", "--prompt", "words"), "no tokenizer"),
        (generate, ("--hf-model", folder / "good", "--prompt", "99"), "token 99"),
        (generate, ("--hf-model", folder / "good", "--prompt", "1", "--top-k", "5"), "--temperature above 0"),
    ]


def test_errors_are_one_sentence_and_leave_nothing(tmp_path, capsys):
    cases = hostile(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    capsys.readouterr()
    for tool, argv, words in cases:
        code, _, err = call(tool, *argv, capsys=capsys)
        assert code == 2 and words in err and err.startswith("error: ") and err.count("\n") == 1, (argv, err)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_model_without_counterpart_names_the_flags(trained, tmp_path, capsys):
    checkpoint, model, tensors = trained
    config = CheckpointReader(str(checkpoint)).config
    config["model"] |= {"squared_relu": True, "swiglu": False}
    kept = [(n, t) for n, t in tensors.items() if "gate_proj" not in n]
    write_checkpoint(str(tmp_path / "ck"), 1, kept, config, {})
    argv = ("--load", tmp_path / "ck", "--output", tmp_path / "hf", "--no-tokenizer")
    code, _, err = call(hf_export, *argv, capsys=capsys)
    assert code == 2 and "LlamaForCausalLM has no counterpart for --activation squared_relu" in err
    argv = ("--load", checkpoint, "--output", tmp_path / "hf", "--architecture", "Qwen3ForCausalLM")
    code, _, err = call(hf_export, *argv, capsys=capsys)
    assert code == 2 and "Qwen3ForCausalLM has no counterpart for a model without --qk-layernorm" in err


def test_as_a_program():
    """From the repository root, without installing anything; --help works."""
    done = subprocess.run(
        [sys.executable, "tools/generate.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "--load" in done.stdout, done.stderr
