"""
Pause tokens, the papers' baseline: three copies of a learned embedding after each token.
Cost: 4 plain passes; attention 16 times.
"""
out_dir = 'out/pause'
ponder = 'pause'
ponder_steps = 3
learning_rate = 3e-4
batch_tokens = 512 * 2048
max_steps = 50000
