"""FLOPs of a step against Megatron's figure, and peaks by device name."""

import json
from pathlib import Path

import pytest

from megatron_lite.arithmetic.flops import flops_per_step, peak_flops, tflops_per_device
from megatron_lite.config import Config, DataConfig, ModelConfig, ParallelConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "flops_golden.json").read_text())


def config_of(case):
    model = ModelConfig(
        num_layers=case["layers"],
        hidden_size=case["hidden"],
        ffn_hidden_size=case["ffn"],
        num_attention_heads=case["heads"],
        num_query_groups=case["kv_heads"],
        kv_channels=case["head_dim"],
        swiglu=case["swiglu"],
        padded_vocab_size=case["padded_vocab"],
        max_position_embeddings=case["seq"],
    )
    return Config(
        model=model, data=DataConfig(seq_length=case["seq"]), parallel=ParallelConfig(world_size=16)
    )


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['layers']}x{case['hidden']}")
def test_equals_megatrons_count(case):
    config = config_of(case)
    assert flops_per_step(config, case["batch"]) == pytest.approx(case["flops"], rel=1e-12)
    assert tflops_per_device(config, case["batch"], 2.0) == pytest.approx(case["flops"] / 2 / 16 / 1e12)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA A100 80GB PCIe", 311.9),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name, teraflops):
    assert peak_flops(name) == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "Tesla V100-SXM2-32GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H2000",
        "NVIDIA A10G",
    ],
)
def test_an_unknown_device_has_no_peak(name):
    assert peak_flops(name) is None
