"""
Router in training without the tokens that stopped, its paper's headline. What it computes is the
same; a step takes less time, and its shapes change from step to step.
"""

import torch
import torch.nn.functional as F

from model import Attention, Memories, Router, RouterMemory, log_weight


def skip_stopped_tokens(model):
    """
    Let a model with Router leave out stopped tokens in training. Not one whose attention is another
    than model.py's, as in some that others released.
    """
    if not isinstance(model.mechanism, Router):     # with ponder_steps=0 it has none
        return
    if any(type(block.attn) is not Attention for block in model.h):
        return
    replaced = [(model, 'mechanism', SkippingRouter(model.config))]
    for block in model.h:
        replaced.append((block, 'attn', SkippingAttention(model.config, block.attn.layer)))
    for owner, name, module in replaced:
        before = getattr(owner, name)
        module.to(model.wte.weight).load_state_dict(before.state_dict())
        setattr(owner, name, module.train(before.training))


class SkippingRouter(Router):

    def new_memory(self, pad):
        return Memories(SparseMemory, self.K + 1, pad) if self.training else super().new_memory(pad)

    @staticmethod
    def one_pass(gpt, x, memory, takes):
        """Router.one_pass for the tokens that take it, side by side: (B,n) of (B,T)."""
        n = int(takes.sum(1).max())
        if not gpt.training or n == x.size(1):
            return Router.one_pass(gpt, x, memory, takes)
        first = takes.byte().argsort(dim=1, descending=True, stable=True)[:, :n]
        place = first.sort(1).values                                    # (B,n), of T
        rows = torch.arange(len(x), device=x.device)[:, None]
        h = gpt.trunk(x[rows, place], memory.at(place, takes[rows, place]))
        return x.to(h.dtype).index_put((rows, place), h)


class SparseMemory(RouterMemory):
    """A RouterMemory of a text; tokens that were left out of a pass have keys of weight 0."""
    place = None        # (B,n): which tokens go through

    def at(self, place, takes):
        """
        Before a pass over the tokens at `place` (B,n) of each row; those that do not take it, by
        `takes` (B,n), fill up the rectangle. Returns this memory.
        """
        self.place = self.pos = place
        self.log_w = log_weight(takes)
        self.keys_per_slot = (place + 1) * self.keys_per_slot       # (B,n): what each query reads
        return self

    def weighted(self, k, v):
        """k and v (B, nkv, n, hd) of the tokens that go through -> of all T."""
        k, v = super().weighted(k, v)
        if self.place is None:
            return k, v
        place = self.place[:, None, :, None].expand_as(k)               # (B, nkv, n, hd + 8)
        everybody = k.new_empty(*k.shape[:2], self.N, k.size(3))        # (B, nkv, T, hd + 8)
        all_k, all_v = self.stand_in(everybody, everybody)
        return all_k.scatter(2, place, k), all_v.scatter(2, place, v)

    def newest(self, layer, S):
        """As in WeightedMemory, of the tokens that go through."""
        if self.place is None:
            return super().newest(layer, S)
        k, v = super().newest(layer, self.N)
        place = self.place[:, None, :, None].expand(-1, k.size(1), -1, k.size(3))
        return k.gather(2, place), v.gather(2, place)


class SkippingAttention(Attention):

    def attend(self, q, k, v, per_slot):
        """Attention.attend; per_slot may be how many keys each query reads, (B,S)."""
        if isinstance(per_slot, int):
            return super().attend(q, k, v, per_slot)
        shared, hd = q.size(1) // k.size(1), q.size(3)
        q = F.pad(q, (0, k.size(3) - hd), value=1.0)
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        reads = torch.arange(k.size(2), device=q.device) < per_slot[:, None, :, None]  # (B,1,n,N)
        dropout = self.config.dropout if self.training else 0.0
        return self.kernel(q, k, v, reads, dropout, scale=hd ** -0.5)[..., :hd]
