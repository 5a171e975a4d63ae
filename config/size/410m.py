"""
The 410M Llama of the pondering papers. Shape, learning rate, length and AdamW are of PonderLM-2's
scripts (arXiv 2509.23184). They train PonderLM-2 with weight decay 0.1, as here, and the looped
model with 0.01. AdaPonderLM (2603.01914) and Adaptive Latent CoT (2602.08220) take half the batch,
256 x 2048.
"""
n_layer = 24
n_head = 16
n_kv_head = None
n_embd = 1024
mlp_hidden = 2752
learning_rate = 3e-4
block_size = 2048
batch_tokens = 512 * 2048
micro_batch = 8
max_steps = 50000
log_interval = 10
eval_interval = 500
eval_tokens = 1024 * 1024
save_interval = 500
