"""
Muon for the matrices of the blocks, AdamW for everything else: --optimizer=muon.

Muon (Jordan and others, 2024: https://kellerjordan.github.io/posts/muon/) moves a matrix along its
averaged gradient, whose singular values it first makes nearly equal. Rare directions then move it
as far as common ones do. It has one moment per weight where AdamW has two, and five times three
products of matrices per step more. Each step is as large, in its root mean square, as AdamW's would
be (Moonshot, https://arxiv.org/abs/2502.16982), so that both share one learning rate.

Tables and vectors stay with AdamW. A row of the embedding is a thing of its own, and the head's is
too; a gain is no matrix.

torch.optim.Muon does the same, but always in bf16, which many CPUs do not have: there its step
takes longer than the forward and the backward pass together.
"""

import torch

MOMENTUM = 0.95


def matrices_of_blocks(model):
    """The weights that Muon moves: attention's and the MLP's. c_attn is one matrix, as it lies."""
    return [p for p in model.h.parameters() if p.dim() == 2]


def equalized(matrix):
    """
    matrix (A,B) -> one with the same singular vectors, whose singular values are all near 1.

    Five steps of a polynomial, s -> 3.4445 s - 4.775 s^3 + 2.0315 s^5, of every singular value s at
    once. It brings those between 0.002 and 1 to between 0.68 and 1.21.
    """
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if tall else matrix   # x x^T is then the smaller product
    x = x / x.norm().clamp(min=1e-7)    # no singular value above 1, and zeros stay zeros
    for _ in range(5):
        square = x @ x.mT
        factor = torch.addmm(square, square, square, beta=-4.775, alpha=2.0315)
        x = torch.addmm(x, factor, x, beta=3.4445)      # 3.4445 x + factor x
    return x.mT if tall else x


class MuonAndAdamW(torch.optim.Optimizer):
    """Both as one optimizer, for GradScaler, checkpoints and the schedule."""

    def __init__(self, for_muon, for_adamw, lr, betas, fused, dtype):
        """
        for_muon: a group, a dict of params and weight_decay. for_adamw: a list of such groups.
        dtype: of the run's products; `equalized` computes in bf16 if they are, else in fp32.
        """
        self.dtype = dtype if dtype == torch.bfloat16 else torch.float32
        self.adamw = torch.optim.AdamW(for_adamw, lr, betas, fused=fused)
        super().__init__([for_muon, *self.adamw.param_groups], dict(lr=lr))

    @torch.no_grad()
    def step(self):
        """Moves every weight that has a gradient."""
        # AdamW works on this optimizer's own groups and state, which load_state_dict makes anew
        for_muon, *self.adamw.param_groups = self.param_groups
        self.adamw.state = self.state
        self.adamw.step()
        lr = for_muon['lr']
        for p in for_muon['params']:
            if p.grad is None:
                continue
            if p not in self.state:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            moment = self.state[p]['momentum_buffer']
            moment.lerp_(p.grad, 1 - MOMENTUM)
            ahead = p.grad.lerp(moment, MOMENTUM)               # Nesterov's
            p.mul_(1 - lr * for_muon['weight_decay'])
            size = 0.2 * max(p.shape) ** 0.5                    # AdamW's root mean square
            p.add_(equalized(ahead.to(self.dtype)), alpha=-lr * size)
