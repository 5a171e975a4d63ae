"""
Adaptive Latent CoT (arXiv 2602.08220), its arm of fixed length: three latent steps after each
token's own.
Cost: 4 plain passes, whose attention reads 1, 2, 3 and 4 times as many keys.
"""
out_dir = 'out/chain'
ponder = 'chain'
ponder_steps = 3
