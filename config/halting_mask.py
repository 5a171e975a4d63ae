"""
PonderLM-3 (arXiv 2603.02023): PonderLM-2 with up to three thoughts per token.
Cost in training: the slots of 18 or 22 plain passes (2 or 3 Jacobi iterations), which read up to
four times the keys: 30 times plain FLOPs at 362M. In generation only the thoughts a token takes.
"""
out_dir = 'out/halting_mask'
ponder = 'latent'
ponder_steps = 3
jacobi_iters = 3
halting = 'mask'
