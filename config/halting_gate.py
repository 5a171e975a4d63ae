"""
AdaPonderLM (arXiv 2603.01914) as in the paper: PonderLM's three steps, each behind a gate.
Cost: as config/embedding.py in training, plus a small MLP per step; in generation only the steps
that are taken.
"""
out_dir = 'out/halting_gate'
ponder = 'embedding'
ponder_steps = 3
halting = 'gate'
