"""
The made tasks: one layer, 94 thousand parameters, two minutes on one CPU core. Name a mechanism's
file first. The task is sums of four digits, whose carries may run through all places. For another
task name its data:

    python train.py config/loop.py config/tasks.py
    python train.py config/loop.py config/tasks.py --data_dir=data/traffic --out_dir=out/traffic
        up to eight rounds of cars on a road
    python train.py config/loop.py config/tasks.py --data_dir=data/minimax --out_dir=out/minimax
        game trees of up to four levels
"""
data_dir = 'data/addition'
n_layer = 1
n_head = 4
n_embd = 64
block_size = 128
batch_tokens = 8 * 128
micro_batch = 8
max_steps = 2400
learning_rate = 4e-3
warmup = 0.05
min_lr_rate = 0.01
log_interval = 100
eval_interval = 800
eval_tokens = 32 * 1024
save_interval = 800
sample_tokens = 40
dtype = 'float32'       # on every CPU, whether it has bf16 or not
threads = 1             # as quick as two, and three times as quick beside another program
