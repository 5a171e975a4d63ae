"""
AdaPonderLM (arXiv 2603.01914) as in the paper: PonderLM's three steps, each behind a gate. The
learning rate is the paper's at 410M.
Cost: as config/ponder.py in training, plus a small MLP per step; at inference only the steps that
a token takes.
"""
out_dir = 'out/halting_gate'
ponder = 'embedding'
ponder_steps = 3
halting = 'gate'
halt_tau = 1e-4
halt_lambda = 0.1
halt_share = 0.1        # the gates under pressure
halt_start = 0.4        # of the run: 20,000 of 50,000 steps
halt_full = 0.48        # 24,000
fast = True             # in training quicker on a CPU too: docs/performance.md
learning_rate = 3e-4
batch_tokens = 256 * 2048
max_steps = 50000
