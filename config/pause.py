"""
Pause tokens, the papers' baseline: three copies of a learned embedding after each token.
Cost: 4 plain passes; attention 16 times.
"""
out_dir = 'out/pause'
ponder = 'pause'
ponder_steps = 3
