"""The plain GPT, every mechanism off. Cost: 1 plain pass."""
out_dir = 'out/vanilla'
