"""
Muon for the matrices of the blocks, AdamW for everything else: --optimizer=muon.

Muon (Jordan and others, 2024: https://kellerjordan.github.io/posts/muon/) moves a matrix along its
averaged gradient, whose singular values it first makes nearly equal. Rare directions then move it
as far as common ones do. It has one moment per weight where AdamW has two, and five times three
products of matrices per step more. PyTorch has it since 2.9; here each step is as large, in its
root mean square, as AdamW's would be (Moonshot, https://arxiv.org/abs/2502.16982), so that both
share one learning rate.

Tables and vectors stay with AdamW. A row of the embedding is a thing of its own, and the head's is
too; a gain is no matrix.
"""

import torch


def matrices_of_blocks(model):
    """The weights that Muon moves: attention's and the MLP's. c_attn is one matrix, as it lies."""
    return [p for p in model.h.parameters() if p.dim() == 2]


class MuonAndAdamW(torch.optim.Optimizer):
    """PyTorch's two as one optimizer, for GradScaler, checkpoints and the schedule."""

    def __init__(self, for_muon, for_adamw, lr, betas, fused):
        """for_muon, for_adamw: lists of groups, each a dict of params and weight_decay."""
        self.muon = torch.optim.Muon(for_muon, lr, adjust_lr_fn='match_rms_adamw')
        self.adamw = torch.optim.AdamW(for_adamw, lr, betas, fused=fused)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure=None):
        """As of torch.optim: moves every weight that has a gradient."""
        first = len(self.muon.param_groups)
        self.muon.param_groups = self.param_groups[:first]      # new ones after load_state_dict
        self.adamw.param_groups = self.param_groups[first:]
        for part in (self.muon, self.adamw):
            part.state = self.state
            part.step()
