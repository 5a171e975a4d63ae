"""
PonderLM-2 (arXiv 2509.23184) as in the authors' 410M script: one latent thought per token, 2 or 3
Jacobi iterations in training. Their norms have eps = 0.1; here it is norm_eps.
Cost: 7 or 9 plain passes in training, 9 to read a prompt, 2 to generate a token.
"""
out_dir = 'out/latent'
ponder = 'latent'
ponder_steps = 1
jacobi_iters = 3        # in evaluation; training draws 2 or 3
