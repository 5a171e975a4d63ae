"""
PonderLM (arXiv 2505.20674): three steps, each adding the expected embedding of the next token.
Learning rate, weight decay, warm-up and batch are those of the authors' 410M script. Its length
(300B tokens, some 143,000 steps) and its factor 3 on the input are not.
Cost: 4 plain passes, and 3 times a head and a mixing matmul, which backward computes once more.
"""
out_dir = 'out/ponder'
ponder = 'embedding'
ponder_steps = 3
ponder_topk = None      # the whole vocabulary, as the authors' code; their text has 100
learning_rate = 3e-4
warmup = 0.01
