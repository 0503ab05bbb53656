"""Continue a prompt with a checkpoint of any layout, or with a Hugging Face folder.

    python tools/generate.py --load CHECKPOINTS --prompt "def main(" --max-new-tokens 64
    python tools/generate.py --hf-model DIR --prompt "Once" --temperature 0.8 --top-p 0.9 --seed 1

Without --temperature the most likely token is taken. A model without a tokenizer takes and gives token ids.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_lite.config import ConfigError
from megatron_lite.data.tokenizer import Tokenizer, add_tokenizer_flags, given_tokenizer
from megatron_lite.files.command_line import Parser, number, run
from megatron_lite.hugging_face.checkpoint_model import CheckpointModel
from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.model.generation import Sampling, generate
from megatron_lite.model.gpt import DTYPES


def main(argv: Sequence[str]) -> None:
    """Parse, load, generate, print."""
    parser = Parser("Continue a prompt.")
    flag = parser.add_argument
    flag("--load", help="folder of checkpoints, or one of them")
    flag("--ckpt-step", type=number(0), help="this step, not the newest")
    flag("--hf-model", type=Path, help="a Hugging Face folder instead")
    flag("--prompt", nargs="+", required=True, help="one or more texts")
    flag("--max-new-tokens", type=number(1), default=64, help="(default: 64)")
    flag("--num-samples", type=number(1), default=1, help="continuations of each prompt (default: 1)")
    flag("--temperature", type=number(0, float), default=0.0, help="0 (default): greedy")
    flag("--top-k", type=number(1), help="sample among the K most likely tokens")
    flag("--top-p", type=number(1e-6, float, 1.0), help="sample among the most likely that sum to P")
    flag("--seed", type=number(0), default=1234, help="of the sampling (default: 1234)")
    flag("--ignore-eod", action="store_true", help="go on after an end of document")
    flag("--dtype", choices=DTYPES, default="fp32", help="of the computation (default: fp32)")
    flag("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add_tokenizer_flags(parser)
    arguments = parser.parse_args(argv)
    if (arguments.load is None) == (arguments.hf_model is None):
        raise ConfigError("wanted one of --load and --hf-model")
    if arguments.temperature == 0 and (arguments.top_k or arguments.top_p):
        raise ConfigError("--top-k and --top-p need sampling, wanted a --temperature above 0 with them")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device here, wanted cpu or no --device")
    if arguments.hf_model is None:
        source = CheckpointModel(arguments.load, arguments.ckpt_step)
    else:
        source = ModelFolder(arguments.hf_model)
    tokenizer = given_tokenizer(arguments, source.model.vocab_size) or source.tokenizer()
    prompts = [encode(text, tokenizer) for text in arguments.prompt]
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = source.load(DTYPES[arguments.dtype], device)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    generator = torch.Generator().manual_seed(arguments.seed)
    stop = set() if arguments.ignore_eod else source.end_ids(tokenizer)
    for text, ids in zip(arguments.prompt, prompts):
        for _ in range(arguments.num_samples):
            new = generate(model, ids, arguments.max_new_tokens, sampling, generator, stop)
            whole = tokenizer.decode(ids + new) if tokenizer else f"{text} {' '.join(map(str, new))}"
            print(whole, flush=True)


def encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt; without a tokenizer the prompt is the ids."""
    if tokenizer is not None:
        return tokenizer.encode(text)
    words = text.split()
    if not all(word.isdigit() for word in words):
        raise ConfigError(f"--prompt is '{text}', the model has no tokenizer: wanted token ids, e.g. '1 2 3'")
    return [int(word) for word in words]


if __name__ == "__main__":
    run(main)
