"""
The defaults, by name: 2.8M parameters, for two CPU cores, a few minutes on bytes.
Small batches and many steps learn most per minute here.
"""
n_layer = 6
n_head = 3
n_embd = 192
block_size = 256
batch_tokens = 4 * 256
micro_batch = 4
max_steps = 2400
learning_rate = 3e-3
log_interval = 50
eval_interval = 600
eval_tokens = 128 * 1024
save_interval = 600
