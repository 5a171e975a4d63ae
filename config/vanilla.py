"""The plain GPT, every mechanism off. Cost: 1 plain pass."""
out_dir = 'out/vanilla'
ponder = 'none'
halting = 'none'
depth_attn = False
