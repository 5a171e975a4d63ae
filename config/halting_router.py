"""
Adaptive Latent CoT (arXiv 2602.08220) as in the paper, which leaves tau open: a chain of up to
three latent steps, which each token may leave.
Cost: 1 plain pass and as many more as a token takes, in training too.
"""
out_dir = 'out/halting_router'
ponder = 'chain'
ponder_steps = 3
halting = 'router'
halt_tau = 1e-4
halt_lambda = 0.4
halt_beta = 10.0
fast = True             # in training quicker on a CPU too: docs/performance.md
learning_rate = 3e-4
batch_tokens = 256 * 2048
max_steps = 50000
