"""Checkpoint folders that are complete or do not count.

What is here needs no torch: finding a checkpoint, its stored configuration, comparing it. What moves tensors is
in `megatron_lite.checkpoint.checkpointer` (Checkpointer: save, async save, load in any layout) and in
`megatron_lite.checkpoint.reading` and `.writing` (read and write a checkpoint in one process).

    SAVE/latest_checkpointed_iteration.txt   "10": the pointer, written last
    SAVE/iter_0000010/manifest.json          every file below with its size and hash; written after them
    SAVE/iter_0000010/config.json            the whole configuration of the run
    SAVE/iter_0000010/train_state.json       iteration, consumed samples, schedule, layout
    SAVE/iter_0000010/tokenizer/             the tokenizer's files
    SAVE/iter_0000010/.metadata, *.distcp    tensors, in the format of torch.distributed.checkpoint
"""

from megatron_lite.checkpoint.compare import stored_config
from megatron_lite.checkpoint.folder import StoredCheckpoint, check_folders, find_checkpoint, find_in

__all__ = ["StoredCheckpoint", "check_folders", "find_checkpoint", "find_in", "stored_config"]
