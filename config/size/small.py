"""26M parameters with a vocabulary of bytes, for one GPU."""
n_layer = 8
n_head = 8
n_embd = 512
block_size = 1024
batch_tokens = 32 * 1024
micro_batch = 8
max_steps = 5000
learning_rate = 2e-3
log_interval = 10
eval_interval = 500
eval_tokens = 1024 * 1024
save_interval = 500
