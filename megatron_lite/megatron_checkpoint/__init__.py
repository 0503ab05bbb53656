"""Checkpoints of Megatron-LM and megatron-core, read without their code and without running anything in them.

torch_dist   iter_N/.metadata and *.distcp: whole tensors, layers stacked
legacy       iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt: one file a rank, merged over tensor and pipeline ranks
weights      their names and rows -> ours
"""
