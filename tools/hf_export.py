"""Write a checkpoint as a Hugging Face model folder, and prove that transformers computes the same from it.

    python tools/hf_export.py --load CHECKPOINTS --output DIR [--ckpt-step N] [--dtype bf16] [--max-shard-size 5GB]

Works on a checkpoint of any layout, in one process, tensor by tensor. DIR gets its name only when the logits of
both sides agree (exit code 1 when they do not).
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_lite.data.tokenizer import add_tokenizer_flags, given_tokenizer
from megatron_lite.files.command_line import Parser, number, run
from megatron_lite.hugging_face.checkpoint_model import CheckpointModel
from megatron_lite.hugging_face.conversions import ExportOptions, export_checkpoint
from megatron_lite.hugging_face.families import FAMILIES
from megatron_lite.hugging_face.output_folder import check_free
from megatron_lite.hugging_face.shards import parse_size
from megatron_lite.hugging_face.verification import add_verification_flags
from megatron_lite.model.gpt import DTYPES


def main(argv: Sequence[str]) -> None:
    """Parse, export."""
    parser = Parser("Write a checkpoint as a Hugging Face model folder.")
    flag = parser.add_argument
    flag("--load", required=True, help="folder of checkpoints, or one of them")
    flag("--ckpt-step", type=number(0), help="this step, not the newest")
    flag("--output", type=Path, required=True, help="folder to make")
    flag("--dtype", choices=DTYPES, default="fp32", help="of the weights (default: fp32)")
    flag("--max-shard-size", default="5GB", help="largest file (default: 5GB)")
    flag("--architecture", choices=FAMILIES, help="default: the first that fits the model")
    flag("--no-tokenizer", action="store_true", help="leave the tokenizer out")
    add_verification_flags(parser)
    add_tokenizer_flags(parser)
    arguments = parser.parse_args(argv)
    options = ExportOptions(
        dtype=DTYPES[arguments.dtype],
        max_shard_bytes=parse_size(arguments.max_shard_size, "--max-shard-size"),
        architecture=arguments.architecture,
        tolerance=arguments.tolerance,
    )
    check_free(arguments.output, "--output")
    source = CheckpointModel(arguments.load, arguments.ckpt_step)
    tokenizer = None
    if not arguments.no_tokenizer:
        tokenizer = given_tokenizer(arguments, source.model.vocab_size) or source.tokenizer()
    export_checkpoint(source, arguments.output, tokenizer, options, print)


if __name__ == "__main__":
    run(main)
