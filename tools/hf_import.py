"""Read a Hugging Face model folder into a checkpoint that training starts from, and prove it computes the same.

    python tools/hf_import.py --hf-model DIR --save CHECKPOINTS
    torchrun pretrain_gpt.py --load CHECKPOINTS --use-checkpoint-args ...

The model's flags are stored in the checkpoint; it loads in any layout. CHECKPOINTS gets its name only when the
logits of both sides agree (exit code 1 when they do not).
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_lite.files.command_line import Parser, number, run
from megatron_lite.hugging_face.conversions import import_folder
from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.hugging_face.output_folder import check_free
from megatron_lite.hugging_face.verification import add_verification_flags


def main(argv: Sequence[str]) -> None:
    """Parse, import."""
    parser = Parser("Read a Hugging Face model folder into a checkpoint.")
    flag = parser.add_argument
    flag("--hf-model", type=Path, required=True, help="folder with config.json and weights")
    flag("--save", type=Path, required=True, help="folder of checkpoints to make")
    flag(
        "--make-vocab-size-divisible-by",
        type=number(1),
        default=128,
        help="the vocabulary is padded to a multiple of this (default: 128)",
    )
    flag("--no-tokenizer", action="store_true", help="leave the tokenizer out")
    add_verification_flags(parser)
    arguments = parser.parse_args(argv)
    check_free(arguments.save, "--save")
    source = ModelFolder(arguments.hf_model, arguments.make_vocab_size_divisible_by)
    tokenizer = None if arguments.no_tokenizer else source.tokenizer()
    name = tokenizer.name if tokenizer else "none"
    print(f"{arguments.hf_model}: {source.family.architecture}, tokenizer {name}")
    import_folder(source, arguments.save, tokenizer, arguments.tolerance, print)


if __name__ == "__main__":
    run(main)
