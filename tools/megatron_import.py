"""Read a checkpoint of Megatron-LM or megatron-core (torch_dist, or one mp_rank file a rank) into one of ours.

    python tools/megatron_import.py --megatron-checkpoint DIR --save CHECKPOINTS THE MODEL'S FLAGS

The model's flags are those of the launch script that made it (--num-layers ... --swiglu ...); the pickled flags in
the files are not read. Of the weights only the model's are taken: training starts at step 0 with a fresh optimizer.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.checkpoint.writing import write_checkpoint
from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.files.command_line import Parser, number, run
from megatron_lite.hugging_face.output_folder import check_free, made_aside
from megatron_lite.megatron_checkpoint.weights import open_megatron, our_tensors, with_stored_vocabulary

# What pretrain_gpt.py wants to know of a run, and a conversion does not.
NO_RUN = [
    *("--micro-batch-size", "1", "--train-iters", "1", "--lr", "1"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1"),
]


def main(argv: Sequence[str]) -> None:
    """Parse, read, write."""
    parser = Parser("Read a checkpoint of Megatron-LM or megatron-core.")
    flag = parser.add_argument
    flag("--megatron-checkpoint", type=Path, required=True, help="its --load folder, or an iter_N")
    flag("--ckpt-step", type=number(0), help="this step, not the newest")
    flag("--save", type=Path, required=True, help="folder of checkpoints to make")
    flag("--vocab-size", type=number(1), help="true size; default: all rows of the embedding")
    flag("--max-position-embeddings", type=number(1), required=True, help="as in the launch script")
    arguments, flags = parser.parse_known_args(argv)
    check_free(arguments.save, "--save")
    length = str(arguments.max_position_embeddings)
    words = [*NO_RUN, "--seq-length", length, "--max-position-embeddings", length, *flags]
    # A NullTokenizer wants a vocabulary; the true one, or the checkpoint's rows, take its place.
    model = replace(parse_arguments(words, Environment()).model, vocab_size=arguments.vocab_size)
    gated = model.mlp_activation.num_inputs == 2
    source = open_megatron(arguments.megatron_checkpoint, arguments.ckpt_step, gated)
    model = with_stored_vocabulary(model, source)
    config = {"model": Config(model=model).to_dict()["model"]}
    state = {"iteration": 0, "consumed_samples": 0, "weights_only": True}
    with made_aside(arguments.save, "--save") as folder:
        path = Path(write_checkpoint(str(folder), 0, our_tensors(source, model), config, state))
    print(
        f"{source.path}: {model.num_layers} layers, vocabulary {model.vocab_size:,} of {model.padded_vocab_size:,} rows"
    )
    print(f"written: {arguments.save / path.name}")


if __name__ == "__main__":
    run(main)
