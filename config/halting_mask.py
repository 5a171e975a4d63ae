"""
PonderLM-3 (arXiv 2603.02023): PonderLM-2 with up to three thoughts per token. What is known of
its recipe is little: the rest is config/latent.py's.
Cost in training: the slots of 18 or 22 plain passes (2 or 3 Jacobi iterations), which read up to
four times the keys: 29 times plain FLOPs at 362M. At inference only the thoughts a token takes.
"""
out_dir = 'out/halting_mask'
ponder = 'latent'
ponder_steps = 3
jacobi_iters = 3
halting = 'mask'
halt_tau = 1e-4
halt_lambda = 0.01      # ours, see `Mask` in model.py
fast = True             # in training quicker on a CPU too: docs/performance.md
learning_rate = 3e-4
batch_tokens = 512 * 2048
max_steps = 50000
