"""
The looped Transformer, the papers' baseline: the whole stack four times in a row.
Cost: 4 plain passes.
"""
out_dir = 'out/loop'
ponder = 'loop'
ponder_steps = 3
loop_norm = True        # as in Ouro
