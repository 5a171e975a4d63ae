"""
The 360M row of the Depth-Attention paper (arXiv 2606.05014, tables 8 and 9):
AdamW, 1024 x 2048 tokens per step, 33B in all.
"""
n_layer = 24
n_head = 15
n_kv_head = None
n_embd = 960
mlp_hidden = 2560       # the paper has 2540, which is no multiple of 8
init_std = 0.02
learning_rate = 1.5e-3
block_size = 2048
batch_tokens = 1024 * 2048
micro_batch = 8
max_steps = 15625
log_interval = 10
eval_interval = 500
eval_tokens = 1024 * 1024
save_interval = 500
