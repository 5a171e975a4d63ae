"""
The looped Transformer whose tokens leave when the model is confident (arXiv 2607.20519): a fixed
prior makes each pass predict, so that any of them can be the last. Three things are ours:
the prior sets in at half of the run, tokens leave in training too (from 70 % of it on), and the
tokens of questions learn to stay. The rest is as in config/loop.py.
Cost: as config/loop.py in training, plus heads after earlier passes from the half of a run on; in
generation only the passes that are taken, plus a head for each.
"""
out_dir = 'out/halting_exit'
ponder = 'loop'
ponder_steps = 3
loop_norm = True
halting = 'exit'
exit_loss = 'ramp'
halt_tau = 0.02         # when the model is sure to 98 %
