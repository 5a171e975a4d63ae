"""
Depth-Attention (arXiv 2606.05014) as in the paper.
Cost: 1.0003 plain passes in FLOPs at 362M; nothing in parameters or cache.
"""
out_dir = 'out/depth_attn'
depth_attn = True
depth_stride = None     # n_layer / 2: the sources are layer 0 and the middle layer
depth_mode = 'softmax'
