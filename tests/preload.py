"""Imported once by the forkserver, so that every test rank starts with the heavy modules in memory."""

import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.pipelining  # noqa: F401
import torch.distributed.tensor.parallel  # noqa: F401

import pretrain_gpt  # noqa: F401
import tests.parity  # noqa: F401
