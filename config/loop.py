"""
The looped Transformer, the papers' baseline: the whole stack four times in a row.
Learning rate, batch and length are those of PonderLM-2's 410M script for it; weight decay is 0.1,
as in all files here, there 0.01.
Cost: 4 plain passes.
"""
out_dir = 'out/loop'
ponder = 'loop'
ponder_steps = 3
loop_norm = True        # as Ouro: without, some runs on the made tasks do not learn
learning_rate = 3e-4
batch_tokens = 512 * 2048
max_steps = 50000
