"""
Game trees of one to six levels, equally often. Two passes for everyone get 93 % of them right, and
three 98 %. Name this file behind config/tasks.py. With eight passes a step takes 0.2 s on one core
of an AMD EPYC (2026-11-25).

    python train.py config/halting_exit.py config/tasks.py config/trees.py
"""
data_dir = 'data/trees'
ponder_steps = 7        # up to eight passes
block_size = 256
batch_tokens = 8 * 256
max_steps = 7200
eval_interval = 2400
save_interval = 2400
learning_rate = 2e-3    # at 4e-3 eight passes for everyone did not learn (one seed)
warmup = 0.1
