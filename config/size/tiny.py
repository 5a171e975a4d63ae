"""2.8M parameters, for two CPU cores: minutes on bytes."""
n_layer = 6
n_head = 3
n_embd = 192
mlp_hidden = 512
block_size = 256
batch_tokens = 16 * 256
micro_batch = 16
max_steps = 600
learning_rate = 6e-3
eval_interval = 200
eval_tokens = 2 ** 17
save_interval = 200
