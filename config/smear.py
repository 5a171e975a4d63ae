"""
Smear: the embedding of the token before joins the input. Four lines of model.py, the simplest
mechanism.
Cost: that of the plain GPT.
"""
out_dir = 'out/smear'
ponder = 'smear'
