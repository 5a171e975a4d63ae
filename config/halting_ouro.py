"""
The looped Transformer with a gate that learns when to leave, as Ouro (arXiv 2510.25741). This is
their first stage; the second trains the gate alone on what a pass gains:

    python train.py out/halting_ouro/settings.json --init_from=out/halting_ouro --ouro_stage=2 \
      --out_dir=out/ouro_gate

Cost: as config/loop.py in training, plus a head after each pass but the last; in generation only
the passes that are taken.
"""
out_dir = 'out/halting_ouro'
ponder = 'loop'
ponder_steps = 3
loop_norm = True
halting = 'ouro'
ouro_stage = 1
halt_tau = 0.5          # it leaves when another pass is less likely than this
