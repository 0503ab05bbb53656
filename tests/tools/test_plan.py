"""The planner as a program."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.config import ConfigError
from megatron_lite.distributed.environment import Environment
from megatron_lite.hugging_face.model_config import read_model_config
from tests.planning.layouts import SMALL
from tools.plan import main

ROOT = Path(__file__).resolve().parents[2]
MODEL = [*SMALL, "--num-layers", "4", "--global-batch-size", "32"]
PLACE = ["--num-gpus", "16", "--gpu", "h100", "--pipeline-model-parallel-size", "2"]


def test_the_table_and_commands_that_check_accepts(capsys):
    main([*PLACE, "--top", "2", *MODEL])
    text = capsys.readouterr().out
    assert "an estimate: matrix products reach 65%" in text and "layouts checked against" in text
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("torchrun")]
    assert len(commands) == 2
    for words in commands:
        assert words[:5] == ["torchrun", "--nproc-per-node", "8", "--nnodes", "2"]
        flags = words[words.index("pretrain_gpt.py") + 1 :]
        config = parse_arguments(["--check", "--world-size", "16", *flags], Environment())
        assert config.parallel.pipeline_model_parallel_size == 2


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "hidden_act": "silu",
}
REST = ["--num-gpus", "8", "--gpu", "h100", "--global-batch-size", "32", "--seq-length", "4096"]


def test_a_hugging_face_model(tmp_path, capsys):
    """Nothing but config.json, the batch and the length: the commands carry the model's flags."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    main([*REST, "--top", "1", "--model", str(tmp_path)])
    text = capsys.readouterr().out
    assert "the commands still need --train-iters or --train-samples, --lr" in text
    words = shlex.split(next(line for line in text.splitlines() if line.startswith("torchrun")))
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    rest = ["--check", "--world-size", "8", "--train-iters", "1", "--lr", "1e-4"]
    config = parse_arguments([*rest, *flags], Environment())
    model, _, _ = read_model_config(LLAMA, "config.json")
    assert replace(config.model, padded_vocab_size=32000) == model
    main([*REST, "--top", "1", "--model", str(tmp_path / "config.json"), "--num-layers", "2"])
    assert "--num-layers 2 " in capsys.readouterr().out  # a flag wins over the file


def test_a_model_that_is_none(tmp_path):
    cases = {"no.json": None, "list.json": [], "other.json": {"architectures": ["BertModel"]}}
    for name, content in cases.items():
        file = tmp_path / name
        if content is not None:
            file.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=re.escape(name)) as caught:
            main([*REST, "--model", str(file)])
        assert "wanted" in str(caught.value) and "\n" not in str(caught.value)


def test_json_without_torch():
    call = f"main({[*PLACE, '--json', *MODEL]!r})"
    program = f"import sys\nfrom tools.plan import main\n{call}\nassert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first, second = found["plans"][:2]
    assert 0 < first["step"]["seconds"] <= second["step"]["seconds"] and 0 < first["step"]["mfu"] < 0.65
    for rank in first["memory_bytes"]:
        sizes = [size for name, size in rank.items() if name not in ("rank", "total", "host")]
        assert sum(sizes) == pytest.approx(rank["total"]) and rank["total"] < 80e9


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num-gpus", "12", "--gpu", "h100", *MODEL], "not a multiple of --gpus-per-node 8"),
        (["--num-gpus", "8", "--gpu", "custom", *MODEL], "--gpu custom needs --gpu-memory-gb"),
        (["--num-gpus", "8", "--gpu", "h100", "--gpu-tflops", "9", *MODEL], "--gpu is h100"),
        (["--num-gpus", "8", "--gpu", "v100", *MODEL], "invalid choice"),
        ([*PLACE, "--pipeline-schedule", "2f2b", *MODEL], "invalid choice: '2f2b'"),
        (["--num-gpus", "0", "--gpu", "h100", *MODEL], "wanted a whole number"),
        (["--num-gpus", "8", "--gpu", "h100", *MODEL, "--hiden-size", "8"], "--hidden-size"),
        ([*PLACE, "--tensor-model-parallel-size", "3", *MODEL], "no layout can run: "),
        (["--num-gpus", "8", "--gpu", "custom", "--gpu-memory-gb", "2.5", "--gpu-tflops", "9", "--nvlink-gb-s", "9"]
         + ["--network-gb-s", "9", "--tensor-model-parallel-size", "1", *MODEL], "no layout fits: of "),
    ],
)  # fmt: skip
def test_errors_are_one_sentence(words, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        main(words)
    assert "\n" not in str(caught.value)


def test_the_exit_code_is_2():
    command = [sys.executable, "tools/plan.py", "--num-gpus", "8", "--gpu", "h100", "--num-layers", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
