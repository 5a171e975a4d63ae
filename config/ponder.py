"""
PonderLM (arXiv 2505.20674) as in the paper, its 410M row: three steps, each adding the expected embedding of the next token.
Cost: 4 plain passes, and 3 times a head and a mixing matmul, which backward computes once more.
"""
out_dir = 'out/ponder'
ponder = 'embedding'
ponder_steps = 3
ponder_topk = None      # the whole vocabulary, as the authors' code; their text has 100
learning_rate = 3e-4
warmup = 0.01
