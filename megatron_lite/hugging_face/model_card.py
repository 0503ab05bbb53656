"""The stub of a model card (README.md of the folder): what the run knows about the model. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from megatron_lite.config import Config

TEMPLATE = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- megatron_lite
---

# {name}

{architecture}, {parameters:,} parameters, trained with megatron_lite; exported from iteration {iteration:,}.

| | |
|---|---|
{rows}

## Data

{data}

## Intended use, limits, licence

To be written by the people who trained it.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


def model_card(
    name: str, architecture: str, parameters: int, dtype: str, config: Config, state: Mapping[str, Any]
) -> str:
    """The text of README.md.

    Args:
        name: of the folder.
        config, state: the checkpoint's configuration and train_state.
    """
    model, training, optimizer = config.model, config.training, config.optimizer
    rows = {
        "layers, width, heads (key/value)": f"{model.num_layers}, {model.hidden_size}, "
        f"{model.num_attention_heads} ({model.num_query_groups})",
        "vocabulary": f"{model.vocab_size:,}",
        "context": f"{config.data.seq_length or model.max_position_embeddings:,} tokens",
        "weights": dtype,
        "consumed samples": f"{state.get('consumed_samples', 0):,}",
        "consumed tokens": f"{state.get('consumed_tokens', 0):,}",
    }
    if state.get("consumed_samples"):
        precision = "bf16" if config.precision.bf16 else "fp16" if config.precision.fp16 else "fp32"
        rows |= {
            "global batch size": training.global_batch_size,
            "optimizer": optimizer.optimizer,
            "learning rate": f"{optimizer.lr} to {optimizer.min_lr}, {optimizer.lr_decay_style}",
            "weight decay": optimizer.weight_decay,
            "precision of training": precision,
            "seed": training.seed,
        }
    paths = config.data.data_path or config.data.train_data_path or ()
    names = [word.replace("\\", "/").rsplit("/", 1)[-1] for word in paths]  # names, not places on one machine
    return TEMPLATE.format(
        name=name,
        architecture=architecture,
        parameters=parameters,
        iteration=state.get("iteration", 0),
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        data="`" + " ".join(names) + "`" if names else "Not known to this checkpoint.",
    )
