"""
PonderLM (arXiv 2505.20674): three steps, each adding the expected embedding of the next token.
The factor 3 on the input, of the authors' 410M script, is left out.
Cost: 4 plain passes, and 3 times a head and a mixing matmul, which backward computes once
more where there are more than 2^25 logits (LOGITS_AT_ONCE in model.py).
"""
out_dir = 'out/embedding'
ponder = 'embedding'
ponder_steps = 3
ponder_topk = None      # the whole vocabulary, as the authors' code; their text has 100
