"""
The 3B row of the Depth-Attention paper (arXiv 2606.05014, tables 8 and 9):
AdamW, 1024 x 2048 tokens per step, 33B in all.
"""
n_layer = 48
n_head = 32
n_kv_head = 8
n_embd = 2048
mlp_hidden = 6912
init_std = 0.01
learning_rate = 1e-3
block_size = 2048
batch_tokens = 1024 * 2048
micro_batch = 2
shard_optimizer = True  # more than one GPU: AdamW's state alone is 22 GB
max_steps = 15625
log_interval = 10
eval_interval = 500
eval_tokens = 1024 * 1024
save_interval = 500
