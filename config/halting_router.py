"""
Adaptive Latent CoT (arXiv 2602.08220) as in the paper, which leaves tau open: a chain of up to
three latent steps, which each token may leave.
Cost: 1 plain pass and as many more as a token takes, in training too, where each has a head.
"""
out_dir = 'out/halting_router'
ponder = 'chain'
ponder_steps = 3
halting = 'router'
