"""
Latent feedback (P2N, in the code of Depth-Attention's authors; arXiv 2608.08888 is near): what came
out at a token joins the input of the next. Training draws 2 or 3 extra passes, as they do.
Cost: 3 or 4 plain passes in training, 4 to read a prompt, 1 to generate a token.
"""
out_dir = 'out/feedback'
ponder = 'feedback'
ponder_steps = 3
