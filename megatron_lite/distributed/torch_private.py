"""The names that torch keeps private and we use: why each, and the test that fails when a new torch changes it.

In this room because the mesh needs one of them, and the rooms above may import it from here. What is no import stands
beside its use: overridden methods of PipelineStage (parallel/pipeline.py), DeviceMesh._flatten (distributed/mesh.py),
torch._foreach_* (training/gradients.py).
"""

import torch.testing._internal.distributed.fake_pg as _fake_pg
from torch._subclasses import fake_tensor as _fake_tensor
from torch.distributed import distributed_c10d as _c10d
from torch.distributed.pipelining import _backward
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils import _python_dispatch, _pytree

# A dry run's tensors without values, and its world in which every message arrives at once: torch has no public ones.
# tests/rehearsal/test_dry_run.py holds the bytes counted with them against those of real ranks.
FakeTensor = _fake_tensor.FakeTensor
FakeTensorMode = _fake_tensor.FakeTensorMode
unset_fake_temporarily = _fake_tensor.unset_fake_temporarily
FakeStore = _fake_pg.FakeStore

# Sees each operator of a step, its tensors however they are nested, and the group that a collective names, to count
# bytes and messages. tests/rehearsal/test_dry_run.py.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
without_dispatch_modes = _python_dispatch._disable_current_modes
tree_leaves = _pytree.tree_leaves
resolve_process_group = _c10d._resolve_process_group

# DTensor remembers results with their mesh, and the next fake world's mesh is equal to it but has other groups.
# tests/rehearsal/test_dry_run.py rehearses several ranks in one process.
forget_sharding_results = _clear_sharding_prop_cache

# Its method _propagate_tensor_meta_non_cached asks fake tensors of global shapes, which are no memory of this rank.
# tests/rehearsal/test_dry_run.py, the peak of layouts with tensor ranks.
sharding_propagator = DTensor._op_dispatcher.sharding_propagator

# The backward of one microbatch as torch's stage makes it; ours calls it between FSDP's settings of each microbatch.
# tests/parallel/test_parity.py: every gradient.
stage_backward = _backward.stage_backward

# DeviceMesh makes groups with torch's own timeout. tests/test_distributed.py reads the timeout of every group.
set_group_timeout = _c10d._set_pg_timeout
