"""
nanoPonder: a GPT you can read in one sitting, with toggles that let it think more per token.

The plain model is a Qwen3-style decoder: RMSNorm before each block, rotary positions, QK-norm, grouped-query
attention, SwiGLU, no biases. One seam carries every mechanism, "embeddings in, hidden states out":

    embed(idx) -> x (B,T,C)        trunk(x, pos) -> h (B,T,C)        head(h) -> logits (B,T,V)

A mechanism is one block of code that decides how often, and on what, the trunk is called; Depth-Attention alone lives inside
the trunk. What attention may read, such as a cache, is an object of memory.py; thinking.py tracks which tokens go on thinking.

Reading order: GPTConfig, Attention and Block (the plain GPT), depth_attention, the functions under "pondering" and "halting"
(the mechanisms), GPT.blocks and GPT.layers, GPT.hidden, GPT.forward, GPT.stream (generation with a cache), and last the loss.

    shape letters   B batch   T tokens   S slots (tokens, or tokens and their latent thoughts)   C n_embd   V vocab_size
                    nh query heads   nkv key/value heads   g = nh / nkv   hd head dimension   L n_layer
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from engine.memory import ChainMemory, FrozenMemory, StepMemory, new_caches, with_key_bias
from engine.halting import Active, Thinking, awake, run_ahead, run_in_step


# ---- settings --------------------------------------------------------------------------------------------------------

@dataclass
class GPTConfig:
    """Shape and toggles of a model. The defaults are the 360M row of the Depth-Attention paper (its tables 8 and 9)."""
    vocab_size: int = 50304             # rows of the embedding table; a multiple of 64 keeps the matmuls fast
    n_tokens: Optional[int] = None      # tokens the tokenizer has; the other rows are masked padding (None: vocab_size)
    block_size: int = 2048              # longest context, in tokens
    n_layer: int = 24                   # blocks
    n_head: int = 15                    # query heads
    n_kv_head: Optional[int] = None     # key/value heads, each serves n_head / n_kv_head query heads (None: n_head)
    n_embd: int = 960                   # width of the residual stream
    head_dim: Optional[int] = None      # width of a head (None: n_embd / n_head)
    mlp_hidden: Optional[int] = 2560    # width inside the MLP (None: 8/3 n_embd, rounded up to a multiple of 64)
    rope_theta: float = 1e4             # base of the rotary frequencies
    norm_eps: float = 1e-5              # inside every RMSNorm
    qk_norm: bool = True                # RMSNorm on each query and key head, before the rotation (Qwen3)
    tie_embeddings: bool = False        # one table for the embedding and the output head
    embed_scale: Optional[float] = None # factor on token embeddings (None: what the mode's paper uses, 1 for the plain GPT)
    init_std: Optional[float] = None    # std of the initial matrices (None: sqrt(2 / (5 n_embd)), 0.02 at width 960)
    dropout: float = 0.0                # on embeddings, attention weights and both residual branches

    # Depth-Attention (arXiv 2606.05014): each layer's values are mixed with those of a few earlier layers
    depth_attn: bool = False            # on or off; adds no parameter and no cache
    depth_stride: Optional[int] = None  # the sources are layers 0, s, 2s, ... below the current one (None: n_layer / 2)
    depth_mode: str = 'softmax'         # 'softmax' as in the paper, or 'uniform': a plain average, the paper's ablation

    # pondering: several passes, or slots, for each token before its successor is predicted
    ponder: str = 'none'                # 'embedding', 'latent', 'chain', 'loop', 'pause': see the functions of these names
    ponder_steps: int = 3               # extra passes, or slots, per token; 0: one plain pass (but the mode's initial weights)
    ponder_topk: Optional[int] = None   # embedding: mix only the k likeliest tokens (None: all, as the authors' code)
    jacobi_iters: int = 3               # latent: refinement passes in evaluation; each training step draws this or one less

    # halting: each token takes as many of those steps as it needs; see the functions of these names
    halting: str = 'none'               # 'gate' (needs ponder='embedding'), 'mask' ('latent') or 'router' ('chain')
    halt_tau: float = 1e-4              # a step is taken if its gate, or its probability of being needed, is at least this
    halt_lambda: Optional[float] = None # weight of the loss term that asks for fewer steps (None: gate 0.1, mask 0.01, router 0.4)
    halt_start: float = 0.4             # gate, mask: share of the run after which that term (and halting by gates) sets in
    halt_full: float = 0.48             # gate, mask: share of the run from which the term has its full weight
    halt_share: float = 0.1             # gate: the term averages the lowest gates, this share of them all
    halt_beta: float = 10.0             # router: the term weighs a step by p^beta, p the probability of the right token

    def __post_init__(self):
        for name in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'head_dim', 'mlp_hidden',
                     'n_tokens', 'depth_stride', 'rope_theta', 'norm_eps', 'embed_scale', 'init_std'):
            value = getattr(self, name)
            if value is not None and not value > 0: raise ValueError(f"{name}={value} must be positive")
        C, own_head_dim, ponder, topk, jacobi = self.n_embd, self.head_dim is not None, self.ponder, self.ponder_topk, self.jacobi_iters
        # with the default init_std, embeddings then have RMS 0.63 (sqrt(C)) or 1 (sqrt(2.5 C)), like normed hidden states
        scale = {'none': 1.0, 'embedding': math.sqrt(C), 'pause': math.sqrt(C)}.get(ponder, math.sqrt(2.5 * C))
        defaults = dict(n_tokens=self.vocab_size, n_kv_head=self.n_head, head_dim=C // self.n_head, embed_scale=scale,
                        mlp_hidden=math.ceil(8 * C / 3 / 64) * 64, init_std=math.sqrt(0.4 / C),
                        depth_stride=max(1, self.n_layer // 2) if self.depth_attn else None,
                        halt_lambda={'gate': 0.1, 'mask': 0.01, 'router': 0.4}.get(self.halting))
        for name, value in defaults.items():
            if getattr(self, name) is None: setattr(self, name, value)
        needs = {'none': ponder, 'gate': 'embedding', 'mask': 'latent', 'router': 'chain'}
        problems = {  # message: whether it applies
            f"n_embd={C} is not a multiple of n_head={self.n_head}: change one, or set head_dim": not own_head_dim and C % self.n_head,
            f"head_dim={self.head_dim} is odd, but rotary positions turn pairs: change n_head or head_dim": self.head_dim % 2,
            f"n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}: change one of them": self.n_head % self.n_kv_head,
            f"n_tokens={self.n_tokens} is larger than vocab_size={self.vocab_size}: raise vocab_size": self.n_tokens > self.vocab_size,
            f"depth_mode={self.depth_mode!r} must be 'softmax' or 'uniform'": self.depth_mode not in ('softmax', 'uniform'),
            f"dropout={self.dropout} must be at least 0 and below 1": not 0 <= self.dropout < 1,
            f"ponder={ponder!r} must be one of {', '.join(map(repr, PONDER))}": ponder not in PONDER,
            f"ponder_steps={self.ponder_steps} and jacobi_iters={jacobi} must not be negative": min(self.ponder_steps, jacobi) < 0,
            f"ponder_topk={topk} must be between 1 and n_tokens={self.n_tokens}": topk is not None and not 1 <= topk <= self.n_tokens,
            f"halting={self.halting!r} must be one of {', '.join(map(repr, needs))}": self.halting not in needs,
            f"halting={self.halting!r} does not work with ponder={ponder!r}: set ponder={needs.get(self.halting)!r}":
                ponder != needs.get(self.halting),
            f"halt_start={self.halt_start} and halt_full={self.halt_full} must be shares of the run, the first one smaller":
                not 0 <= self.halt_start < self.halt_full <= 1,
            "halt_tau, halt_lambda and halt_beta must not be negative, halt_share must be between 0 and 1":
                min(self.halt_tau, self.halt_lambda or 0, self.halt_beta) < 0 or not 0 <= self.halt_share <= 1}
        for message, true in problems.items():
            if true: raise ValueError(message)

    @property
    def slots(self):
        """Places a token takes in the sequence that attention sees."""
        return self.ponder_steps + 1 if self.ponder in ('latent', 'chain', 'pause') else 1

    def sources(self, layer):
        """S(l): the earlier layers whose values Depth-Attention mixes into those of `layer`, in this order."""
        return range(0, layer, self.depth_stride) if self.depth_attn else range(0)


# ---- the plain GPT ---------------------------------------------------------------------------------------------------

class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        # The weight follows x to bf16: on mixed dtypes PyTorch warns and drops its fused kernel. Autocast on CUDA would return fp32.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


def rope_table(pos, head_dim, theta, dtype):
    """
    Rotary positions (arXiv 2104.09864) for `pos` (S,) or (B,S), which may repeat: cos and signed sin, each (.., S, 1, hd).
    The pairs (x_i, x_{i + hd/2}) turn by pos * theta^(-2i / hd): the half-split layout of Llama and Qwen.
    """
    wide = torch.promote_types(dtype, torch.float32)  # bf16 cannot tell position 257 from 256
    freq = theta ** (-torch.arange(0, head_dim, 2, device=pos.device, dtype=wide) / head_dim)
    angle = pos.to(wide)[..., None, None] * freq      # (S, 1, hd/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x, cos, sin):
    """Turn x (B, S, heads, hd) by its positions' angles. Rolling by half the head swaps the members of each pair."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


class Attention(nn.Module):
    """Causal grouped-query attention. Keys and values come from `memory` (None: this pass's own), `mask` says which each slot reads."""
    sdpa = None  # tune_cpu: what to use in the place of PyTorch's kernels

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.dropout, self.depth_mode = config.dropout, config.depth_mode
        self.c_attn = nn.Linear(config.n_embd, (self.n_head + 2 * self.n_kv_head) * self.head_dim, bias=False)  # q, k, v in one matmul
        self.c_proj = nn.Linear(self.n_head * self.head_dim, config.n_embd, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x, rope, sources=(), memory=None, mask=None, bias=None):
        """x (B,S,C) -> y (B,S,C), and this layer's (k, v) for later layers to read, each (B, nkv, S, hd)."""
        B, S, _ = x.shape
        qkv = self.c_attn(x).view(B, S, self.n_head + 2 * self.n_kv_head, self.head_dim)
        q, k, v = qkv.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=2)
        q = apply_rope(self.q_norm(q), *rope).transpose(1, 2)  # (B, nh, S, hd)
        k = apply_rope(self.k_norm(k), *rope).transpose(1, 2)  # (B, nkv, S, hd)
        v = depth_attention(q, k, v.transpose(1, 2), sources, self.depth_mode)  # (B, nkv, S, hd); without sources v itself
        q, keys, values = with_key_bias(q, k, v, bias) if bias is not None else (q, k, v)
        if memory is not None: keys, values = memory.update(self.layer, keys, values)  # (B, nkv, everything readable, hd)
        attend = partial(self.sdpa or F.scaled_dot_product_attention, dropout_p=self.dropout * self.training, scale=self.head_dim ** -0.5)
        shared = self.n_head > self.n_kv_head and S > 1
        if shared and (mask is not None or q.is_cuda and q.dtype != torch.bfloat16):  # or CUDA's grouped attention may hold all scores
            keys, values = (t.repeat_interleave(self.n_head // self.n_kv_head, 1) for t in (keys, values))
        if S == 1:  # the queries that share a key head become its sequence of queries, so no key is repeated
            y = attend(q.reshape(B, self.n_kv_head, -1, q.size(-1)), keys, values, attn_mask=mask).reshape(q.shape)
        elif isinstance(mask, list):  # one group of queries at a time, each with only the keys it may read (ChainMemory)
            groups = zip(q.split([seen.size(0) for _, seen in mask], 2), mask)
            y = torch.cat([attend(some, keys[:, :, :n], values[:, :, :n], attn_mask=seen) for some, (n, seen) in groups], 2)
        else: y = attend(q, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) > keys.size(1))
        return self.c_proj(y[..., :self.head_dim].transpose(1, 2).reshape(B, S, -1)), (k, v)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): c_proj(silu(gate) * up), gate and up in one matmul."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.mlp_hidden, bias=False)
        self.c_proj = nn.Linear(config.mlp_hidden, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.c_fc(x).chunk(2, dim=-1)
        return self.c_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Two residual branches, each with its norm in front."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.ln_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rope, sources=(), memory=None, mask=None, bias=None):
        y, new = self.attn(self.ln_1(x), rope, sources, memory, mask, bias)
        x = x + self.drop(y)
        return x + self.drop(self.mlp(self.ln_2(x))), new


# ----------------------------------------------------------------------------------------------------------------------
# Depth-Attention: Cross-Layer Value Mixing for Language Models (arXiv 2606.05014)
#
# Before layer l attends over the sequence, it attends over depth, at one position: its query scores its own key and the
# keys of a few earlier layers j in S(l), and the softmax of these scores mixes their values into the layer's value.
#
#     a_{l,j} = softmax_j( q_l . k_j / sqrt(hd) )                  over j in S(l) and l itself                  (Eq. 2)
#     v~_l    = a_{l,l} v_l + sum_{j in S(l)} a_{l,j} v~_j         own value raw, earlier ones already mixed    (Eq. 3)
#     o_l     = causal attention of (q_l, k_l, v~_l)               keys stay as they are                        (Eq. 4)
#
# S(l) is every layer below l that is a multiple of the stride s = n_layer / 2 (GPTConfig.sources): the anchors 0, s, 2s, ...
# whose keys and values GPT.layers keeps for the length of one pass. Layer 0 has no source and is an ordinary layer.
# q and k are those of sequence attention, after norm and rotation; at one position both sides are turned alike, so the
# rotation cancels. With grouped queries the g queries of a key/value head are averaged first.
#
# Cost: 4 (|S(l)| + 1) nkv hd FLOPs per token and layer, 0.03 % of the 360M model. No parameter. The cache stores v~ in
# the place of v, so it is the plain GPT's byte for byte.
# Where this differs from the authors' code: keys are normed before they are rotated (the paper's "Qwen3-style" order),
# not after, so that weights depend on no absolute position; and the mixed value is cached, which makes decoding exact.
# Anchors are absolute, as in their code; counted down from each layer, as one sentence of the paper has it, half would have none.

def depth_attention(q, k, v, sources, mode='softmax'):
    """
    The mixed values v~ (B, nkv, S, hd) of a layer with q (B, nh, S, hd) and k, v (B, nkv, S, hd).
    sources: [(k_j, v~_j), ...] of the layers in S(l), in any order; with none of them the result is v itself.
    mode: 'softmax' (Eq. 2), or 'uniform', equal weights, which keeps most of the gain in the paper's ablation.
    """
    if not sources: return v  # layer 0, or the plain GPT
    q = q.unflatten(1, (k.size(1), -1)).mean(2) if q.shape != k.shape else q     # (B, nkv, S, hd)
    keys = [k_j for k_j, _ in sources] + [k]
    values = [v_j for _, v_j in sources] + [v]
    if mode == 'uniform': return sum(values) / len(values)
    if k.size(2) == 1 and not torch.compiler.is_compiling():  # one slot, and nothing to fuse what follows: depth is a short sequence
        return F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2))
    # One source at a time: stacking them would make autograd keep a copy of every source in every later layer.
    wide = torch.promote_types(q.dtype, torch.float32)  # for sums and softmax; float64 stays float64
    scores = torch.cat([(q * k_j).sum(-1, keepdim=True, dtype=wide) for k_j in keys], dim=-1)
    weights = torch.softmax(scores * k.size(-1) ** -0.5, dim=-1).to(v.dtype).split(1, dim=-1)  # each (B, nkv, S, 1)
    mixed = weights[0] * values[0]
    for a_j, v_j in zip(weights[1:], values[1:]): mixed = torch.addcmul(mixed, a_j, v_j)
    return mixed                                                                 # (B, nkv, S, hd)


# ----------------------------------------------------------------------------------------------------------------------
# pondering: what happens between embed(idx) and head(h). Each function takes scaled embeddings x (B,T,C) at positions
# pos (T,), returns the hidden states (B,T,C) that predict the next tokens, and reads and extends `memory`, the list of
# caches of GPT.new_memory, or [None, ...] without a cache. s is ponder_steps.

def interleave(slots):
    """[(B,T,C)] * n -> (B, T n, C), token by token: x_0 z_0 .. x_1 z_1 .."""
    return torch.stack(slots, 2).flatten(1, 2)


def plain(gpt, x, pos, memory, jacobi):
    """The plain GPT: one pass."""
    return gpt.trunk(x, pos, memory[0])


# PonderLM: Pretraining Language Models to Ponder in Continuous Space (arXiv 2505.20674), equations 3 to 7
#
#     P_j     = softmax(head(trunk(E_j)))          the distribution over the next token after j steps       (B,T,V)
#     E_{j+1} = E_j + P_j (embed_scale W_in)       the mean embedding under it joins the running input     (B,T,C)
#     logits  = head(trunk(E_s))                   the loss reads the last pass only
#
# Cost: s + 1 passes, and per step 4 V C more FLOPs forward: a head to get P, and a matmul to mix. One cache per pass.
# Where this differs from the authors' code: generation is cached, the softmax is fp32, padding in the vocabulary gets no
# mass, the input is not multiplied by s (a flag of theirs that the paper does not have). All tokens are mixed, as in their
# code; the paper's text has the 100 likeliest (ponder_topk).

def embedding(gpt, x, pos, memory, jacobi):
    """PonderLM: add the expected embedding of the next token to the input, and run the trunk again."""
    for step in range(gpt.config.ponder_steps):
        x = x + gpt.mixture(gpt.trunk(x, pos, memory[step]))
    return gpt.trunk(x, pos, memory[-1])


# PonderLM-2: Pretraining LLM with Latent Thoughts in Continuous Space (arXiv 2509.23184)
#
# K = ponder_steps latent thoughts follow each token, each the last hidden state of the slot before it:
#
#     x_0 z_{0,1} .. z_{0,K}  x_1 z_{1,1} ..       z_{t,k} = trunk(...) at the slot before; the K-th predicts token t + 1
#
# One token's slots share its position, and attention is causal over the flat sequence, so the latents of t depend on all before
# them: exact, but sequential. Training solves the recursion by Jacobi iteration instead. The first K passes add one guess each
# (first: a plain pass's hidden state), R more refresh all, a last one gives the output. z_{t,k} is exact after t K + k passes.
# Cost: K (K + 1) / 2 + (R + 1)(K + 1) times T slots, 9 T for K = 1, R = 3, which read up to K + 1 times the keys: 9.9 plain passes
# at 362M (K = 3: 32). Decoding: K + 1 passes of one slot. Where this differs from the authors' code: train.py draws R for each
# optimizer step, theirs for each forward; a prompt can also be read exactly (`exact` in GPT.stream, or R = K (T - 1)).

def latent(gpt, x, pos, memory, jacobi):
    """PonderLM-2: the last hidden state goes back in as the next slot of the sequence."""
    K, T, cache = gpt.config.ponder_steps, x.size(1), memory[0]
    if cache is not None and T == 1:                        # decoding: the recursion itself
        for _ in range(K + 1): x = gpt.trunk(x, pos, cache)
        return x
    begin = cache.length if cache is not None else 0

    def run(slots):                                         # [(B,T,C)] * n -> the hidden state of each
        n = len(slots)
        if cache is not None: cache.length, cache.slots_now = begin, n  # drop what the last pass wrote: a guess
        h = gpt.trunk(interleave(slots), pos.repeat_interleave(n), cache)
        return h.unflatten(1, (T, n)).unbind(2)

    slots = [x]
    for p in range(K + jacobi) if K else ():
        slots = [x, *run(slots)[:min(p + 1, K)]]            # z_k <- output at slot k - 1
    h = run(slots)
    if K and not gpt.training:  # the next iterate comes for free: how far is it from this one? (RMS; 0 once exact)
        gpt.jacobi_change = (torch.stack(h[:K]) - torch.stack(slots[1:])).detach().square().mean().sqrt()
    return h[K]


# Adaptive Latent CoT (arXiv 2602.08220), its arm of fixed length
#
#     z_t^(1)   = trunk at slot (t, 1), read from the token's embedding          k = 1 .. K, K = s + 1
#     z_t^(k+1) = trunk at slot (t, k+1), read from z_t^(k)
#     slot (t, k) sees slot (t', k') if and only if t' <= t and k' <= k          (Eq. 2)
#
# Step k never looks at later steps, so all tokens take it at once: exact, in parallel, without iteration, and the keys and
# values of earlier steps are computed once. Cost: s + 1 passes, whose attention reads 1, 2, .. s + 1 times as many keys.

def chain(gpt, x, pos, memory, jacobi):
    """A chain of latent thoughts: step k of every token reads steps up to k of all tokens before."""
    cache, read = memory[0], None
    everyone = Active(awake(x, pos, cache), gather=cache is not None)
    for step in range(gpt.config.ponder_steps + 1):
        read = cache.open(everyone, pos, step) if cache is not None else ChainMemory(gpt.config.n_layer, pos, read)
        x = everyone.put(x, gpt.trunk(everyone.take(x), everyone.take(pos), read))
    return x


def loop(gpt, x, pos, memory, jacobi):
    """
    The looped Transformer, a baseline of the papers: all blocks s + 1 times in a row, the final norm once. One cache per loop.
    With depth_attn, what the same layer made in earlier loops is a source too, as in Depth-Attention's paper.
    """
    earlier = [[] for _ in gpt.h] if gpt.config.depth_attn else None
    for cache in memory: x = gpt.blocks(x, pos, cache, earlier=earlier)
    return gpt.ln_f(x)


def pause(gpt, x, pos, memory, jacobi):
    """
    Pause tokens, a baseline of the papers: s copies of one learned embedding follow each token, at its position, and the
    last of them predicts the next token. One pass of s + 1 slots per token, each reading s + 1 times as many keys.
    """
    n = gpt.config.slots
    slots = [x] + [(gpt.pause * gpt.config.embed_scale).expand_as(x) for _ in range(n - 1)]  # s = 0 has no such parameter
    h = gpt.trunk(interleave(slots), pos.repeat_interleave(n), memory[0])
    return h[:, n - 1::n]


PONDER = {'none': plain, 'embedding': embedding, 'latent': latent, 'chain': chain, 'loop': loop, 'pause': pause}


# ----------------------------------------------------------------------------------------------------------------------
# halting: three of the modes above, each token with its own number of steps. Same arguments, but they return a
# Thinking (thinking.py): it calls their `think`, one pass over the slots that go on, until none does (`mask` does so where it
# decodes token by token; elsewhere it iterates, as `latent` does). That leaves gpt.steps (B,T), the passes each token took, and
# without a cache gpt.trace, for `penalty`. With a cache, passes not taken are not computed (except in `mask`'s prompts).

# AdaPonderLM: Gated Pondering Language Models with Token-Wise Adaptive Depth (arXiv 2603.01914), on ponder='embedding'
#
#     s^i     = sigmoid(MLP_i(h^i))                         a gate after every pass i but the last       (2), (3)
#     m^{i+1} = m^i and s^i >= tau                          who takes another pass; nobody comes back    (4), (5)
#     E^{i+1} = E^i + m^{i+1} s^i P^i W_in                  PonderLM's step, scaled by the gate          (6) to (9)
#     a token with m^i = 0 keeps the K, V of its last pass, in every layer                               (10)
#
# The loss gains halt_lambda times the mean of the lowest gates (13); their share of all gates grows to halt_share between
# halt_start and halt_full (14). Before halt_start nobody halts in training, or cross-entropy alone would shut gates for good.
# Cost: `embedding` in training, plus 8 C^2 FLOPs per gate; the mean of steps at inference, whose attention reads all steps' keys.
# Where the paper is silent: a token ends with the hidden state of its last pass (or training would compute what skipping cannot);
# (13) counts its later gates too, on what those passes would have made of it; there is no gate after the last pass; GELU; gates
# start about sigmoid(4). No public code.

def gate(gpt, x, pos, memory, jacobi):
    """AdaPonderLM: a gate after each pass scales the step to the next, and ends the token's pondering below halt_tau."""
    c, cache = gpt.config, memory[0]

    def think(trunk, a, k, x, s, h):                                        # x, h (r,n,C), s (r,n)
        # decoding, slots may be at different steps, each with its own gate; padding asks for none of its own
        steps = k.where(a.valid, k.max()).unique().tolist() if cache is not None else [k]
        if any(steps): x = x + ((s * a.valid)[..., None] * gpt.mixture(h)).to(x.dtype)  # (9): a.valid is m; none before a first pass
        h = trunk(x)
        gates = ((k == i) * gpt.wide(gpt.gates[i], h).squeeze(-1).sigmoid() for i in steps if i < c.ponder_steps)
        s = sum(gates, torch.zeros_like(s))
        on = (s >= c.halt_tau) & (k < c.ponder_steps)
        if gpt.training and gpt.progress < c.halt_start: on = a.valid & (k < c.ponder_steps)
        if cache is not None: cache.replace(on & a.valid)
        elif k < c.ponder_steps: gpt.trace.append(s)
        return (x, s, h), on

    s = x.new_zeros(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
    return Thinking(gpt, think, pos, cache, (x, s, torch.zeros_like(x)), FrozenMemory, gather=False)


# PonderLM-3: Adaptive Token-Wise Pondering with Differentiable Masking (arXiv 2603.02023), on ponder='latent'
#
#     s_t     = softmax(router(h_t^(0)))              how many thoughts token t needs, K + 1 outcomes
#     w_{t,k} = sum_{j >= k} s_{t,j}                  probability that thought k is needed: 1 for k = 0, falling in k
#     scores of key (t, k), in every layer, += log w_{t,k}
#     output  = sum_k s_{t,k} h_t^(k)                 h_t^(k): hidden state at slot (t, k)
#
# Training computes all slots and refreshes s in every Jacobi sweep. Outside of training, slots with w < tau do not exist.
# Cost: `latent` in training; in decoding 1 + (the number of thoughts with w >= tau) slots, more than the sum of w. The text of the
# paper could not be had: the equations are those of its figure and of a reader's notes. The term that asks for fewer steps is
# ours: halt_lambda times the expected thoughts, sum_{k >= 1} w_{t,k}, from halt_start on.

def mask(gpt, x, pos, memory, jacobi):
    """PonderLM-3: a router says up front how many latents a token needs; the others fade out in training and are cut otherwise."""
    (B, T, _), K, cache = x.shape, gpt.config.ponder_steps, memory[0]
    real, log_tau = awake(x, pos, cache), math.log(min(max(gpt.config.halt_tau, 1e-300), 1))
    s = log_w = x.new_zeros(B, T, K + 1, dtype=torch.promote_types(x.dtype, torch.float32))  # before the first `route`

    def route(h):                                           # h_t^(0) -> s and log w
        log_s = gpt.wide(gpt.router, h).log_softmax(-1)     # (B,T,K+1)
        log_w = F.pad(log_s[..., 1:].flip(-1).logcumsumexp(-1).flip(-1), (1, 0))  # tail sums without leaving log space; w_0 = 1
        return log_s.exp(), log_w

    def run(slots):                                         # [(B,T,C)] * n -> the hidden state of each
        n, flat = len(slots), interleave(slots)
        at, bias = pos.repeat_interleave(n), log_w[..., :n].flatten(1)
        if not gpt.training: bias = bias.masked_fill(bias < log_tau, -math.inf)  # computed, but not read: the next sweep may want it
        if cache is None: h = gpt.trunk(flat, at, bias=bias)
        else:
            if cache.time is not None: cache.forget(cache.time >= pos[0] * (K + 1))  # what the last sweep wrote: a guess
            a, time = Active(real.repeat_interleave(n, 1)), at * (K + 1) + torch.arange(n, device=x.device).repeat(T)
            read = cache.open(a, time, bias=a.take(bias).to(x.dtype))
            h = a.put(flat, gpt.trunk(a.take(flat), a.take(at), read))
        return h.unflatten(1, (T, n)).unbind(2)

    def think(trunk, a, k, x, s, log_w, out):               # decoding, slot k: the recursion itself
        pick = lambda t, k: t.gather(-1, k[..., None])[..., 0]  # (r,n,K+1) at k (r,n) -> (r,n)
        h = trunk(x, pick(log_w, k).to(x.dtype))
        s, log_w = (torch.where((k == 0)[..., None], new, old) for new, old in zip(route(h), (s, log_w)))
        return (h, s, log_w, out + pick(s, k)[..., None] * h), pick(log_w, (k + 1).clamp(max=K)) >= log_tau

    if cache is not None and T == 1: return Thinking(gpt, think, pos, cache, (x, s, log_w, torch.zeros_like(x, dtype=s.dtype)), flat=True)
    h = run([x])
    for p in range(K + jacobi):
        s, log_w = route(h[0])
        h = run([x, *h[:min(p + 1, K)]])
    s, log_w = route(h[0])
    kept = real[..., None] & (log_w >= log_tau)
    gpt.steps = kept.sum(-1)
    if cache is None: gpt.trace.append(s)
    else: cache.forget(cache.bias == -math.inf)
    if not gpt.training: s = s * kept
    return sum(s[..., k, None] * h_k for k, h_k in enumerate(h)).to(x.dtype)


# Pretraining with Token-Level Adaptive Latent Chain-of-Thought (arXiv 2602.08220), on ponder='chain'
#
#     g_t^(k)  = sigmoid(router(z_t^(k))), 0 after the last step                  whether to go on                  (3)
#     reach^(1) = 1,  reach^(k+1) = reach^(k) g^(k)                               probability of getting there      (4)
#     K* = the last step with reach >= tau                                        later ones are never computed     (6)
#     output = sum_k weight^(k) z^(k),  weight = reach (1 - g) before K*, reach at K*                               (5), (7), (8)
#     loss  += halt_lambda * mean_t sum_{k <= K*} g^(k) p_k(y_t)^beta             p_k: the right token's probability after
#                                                                                step k, a constant for the gradient (9), (10)
#
# Cost: the mean of steps in plain passes, in training too, where p_k takes one head per step. Where the paper is silent: tau
# is 1e-4 as in the others, embeddings are scaled as in PonderLM-2, the router starts around 1/2, sums over t are means. No public code.

def router(gpt, x, pos, memory, jacobi):
    """Adaptive Latent CoT: a chain that each token leaves when its probability of going on falls below halt_tau."""
    c, cache = gpt.config, memory[0]

    def think(trunk, a, k, x, reach, out):                                  # k counts from 0 (above from 1); x, out (r,n,C), reach (r,n)
        z = trunk(x)
        g = gpt.wide(gpt.router, z).squeeze(-1).sigmoid()
        on = (reach * g >= c.halt_tau) & (k < c.ponder_steps)
        weight = torch.where(on, reach * (1 - g), reach)
        if cache is None and k < c.ponder_steps: gpt.trace.append((a, z.detach(), g))
        return (z, reach * g, out + weight[..., None] * z), on

    reach = x.new_ones(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
    state = x, reach, torch.zeros_like(x, dtype=reach.dtype)
    return Thinking(gpt, think, pos, cache, state, StepMemory, gather=not gpt.dense)


def penalty(gpt, targets):
    """What halting adds to the training loss to discourage steps that do not help; targets as in GPT.forward."""
    c, trace, counts = gpt.config, gpt.trace, targets >= 0
    ramp = min(max((gpt.progress - c.halt_start) / (c.halt_full - c.halt_start), 0.0), 1.0)
    if c.halting == 'gate':
        gates = torch.cat([s.masked_fill(~counts, math.inf) for s in trace]).flatten().sort().values  # ignored tokens last
        n = (ramp * c.halt_share * len(trace) * counts.sum()).floor()  # a tensor: the host need not wait for a GPU
        return c.halt_lambda * gates.where(torch.arange(len(gates), device=gates.device) < n, 0.0).sum() / n.clamp(min=1)
    if c.halting == 'mask':
        expected = (trace[0] * torch.arange(c.ponder_steps + 1, device=targets.device)).sum(-1)  # (B,T)
        return c.halt_lambda * ramp * (expected * counts).sum() / counts.sum().clamp(min=1)
    terms = [(g, a.take(targets), a.valid & a.take(counts), z) for a, z, g in trace]  # each (r,n)
    total = sum((g * gpt.probability(z, y.clamp(min=0)) ** c.halt_beta * on).sum() for g, y, on, z in terms)
    return c.halt_lambda * total / counts.sum().clamp(min=1)


HALTING = {'gate': gate, 'mask': mask, 'router': router}


# ---- the loss --------------------------------------------------------------------------------------------------------

# At vocabulary 50,304 the logits of 8 x 2048 tokens take 3.3 GB in fp32, and so does their gradient, softmax - onehot, which is
# known as soon as they are: forward turns each chunk of logits into its share of dL/dh and dL/dW; backward only scales.

class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean of -log softmax(h W^T)[target] over the rows of h (N,C), without ever holding all logits."""
    CHUNK = 2 ** 25  # logits held at a time: 134 MB in fp32

    @staticmethod
    def forward(ctx, h, weight, targets, n_tokens, need_grad):
        device = h.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
        x, w = h.to(dtype), weight.to(dtype)                     # (N,C), (V,C)
        wide = torch.promote_types(dtype, torch.float32)         # softmax and sums are at least fp32
        valid = targets >= 0                                     # a negative target counts for nothing
        count = valid.sum().clamp(min=1)                         # if all are ignored: loss 0, not 0 / 0
        total = torch.zeros((), dtype=wide, device=h.device)
        if need_grad: dh, dw = torch.empty_like(x), torch.zeros_like(weight)
        rows = max(1, ChunkedCrossEntropy.CHUNK // weight.size(0))
        for i in range(0, x.size(0), rows):
            chunk = slice(i, i + rows)
            y, ok = targets[chunk, None].clamp(min=0), valid[chunk, None]  # (n,1)
            logits = (x[chunk] @ w.t()).to(wide)                 # (n,V)
            logits[:, n_tokens:] = -math.inf                     # padded rows of the table
            logp = logits.log_softmax(-1)
            total -= (logp.gather(1, y) * ok).sum()
            if need_grad:
                p = logp.exp_()                                  # in place from here: softmax,
                p = p.scatter_add_(1, y, -torch.ones_like(y, dtype=wide)).to(dtype)  # minus onehot,
                dh[chunk] = (p @ w) * ok                         # and nothing for ignored rows
                dw += p.t() @ (x[chunk] * ok)
        if need_grad: ctx.save_for_backward(dh, dw, count)
        return total / count

    @staticmethod
    def backward(ctx, grad):
        # divided by the row count only here: earlier, small probabilities would underflow in fp16
        dh, dw, count = ctx.saved_tensors
        return dh * (grad / count), dw * (grad / count), None, None, None


# ---- the model -------------------------------------------------------------------------------------------------------

class GPT(nn.Module):
    """A decoder-only transformer; see the top of this file."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.jacobi_change = None            # how far another iteration of 'latent' would have moved its thoughts
        self.steps = None                    # with halting: passes each token took in the last call, (B,T)
        self.trace = []                      # with halting: what `penalty` needs to know of that call
        self.progress = 1.0                  # with halting: share of the training run that is done; train.py sets it
        self.dense = False                   # 'router': compute halted tokens too, so that all shapes stay the same
        self.decode_layers = None            # hardware.py: `layers`, compiled for one new token
        self.checkpoint_activations = False  # train.py: recompute each block in backward instead of keeping its insides
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings: self.lm_head.weight = self.wte.weight
        C, s = config.n_embd, config.ponder_steps
        self.mechanism = HALTING[config.halting] if config.halting != 'none' and s else PONDER[config.ponder]  # see `hidden`
        if config.ponder == 'pause' and s: self.pause = nn.Parameter(torch.randn(C) * config.init_std)
        new_gate = lambda: nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, 1))
        if config.halting == 'gate': self.gates = nn.ModuleList(new_gate() for _ in range(s))
        if config.halting in ('mask', 'router') and s: self.router = nn.Linear(C, s + 1 if config.halting == 'mask' else 1)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)): nn.init.normal_(module.weight, std=config.init_std)
            # routers start undecided on average; gates (.2: their last layer) open, about sigmoid(4): training begins as plain pondering
            if getattr(module, 'bias', None) is not None: nn.init.constant_(module.bias, 4.0 if name.endswith('.2') else 0.0)
            # the pondering papers start each block's contribution small, since the stack runs on its own output
            if config.ponder != 'none' and name.endswith('c_proj'): module.weight.data /= math.sqrt(2 * config.n_layer)

    def embed(self, idx):
        """Tokens (B,T) -> embeddings times embed_scale (B,T,C)."""
        return self.drop(self.wte(idx) * self.config.embed_scale)

    def trunk(self, x, pos, memory=None, bias=None):
        """
        All blocks and the final norm: x (B,S,C) at rotary positions pos (S,) or (B,S), which may repeat -> h (B,S,C). A slot
        reads itself and all before it, or what `memory` says. bias (B,S): added, in every layer, to all scores against these keys.
        """
        return self.ln_f(self.blocks(x, pos, memory, bias))

    def blocks(self, x, pos, memory=None, bias=None, earlier=None):
        """`trunk` without the final norm. earlier: for each layer the (k, v) of earlier loops; this one's are appended."""
        mask = memory.mask(x.size(1), x.device) if memory is not None else None  # see memory.py
        layers = self.decode_layers if getattr(memory, 'compiled', False) and not earlier else self.layers  # see compile_decoding
        return layers(x, rope_table(pos, self.config.head_dim, self.config.rope_theta, x.dtype), memory, mask, bias, earlier)

    def layers(self, x, rope, memory, mask, bias, earlier):
        """All blocks, one after the other; arguments as `blocks` makes them."""
        made = {}  # layer: (key, mixed value), for the layers that later ones read, in this pass only (depth_attention)
        wanted = {j for layer in range(len(self.h)) for j in self.config.sources(layer)}
        for layer, block in enumerate(self.h):
            sources = (*(earlier[layer] if earlier else ()), *[made[j] for j in self.config.sources(layer)])
            # sources are arguments and results of a block: if it appended them itself, recomputation would append them twice
            call = partial(checkpoint, block, use_reentrant=False) if self.checkpoint_activations and self.training else block
            x, new = call(x, rope, sources, memory, mask, bias)
            if layer in wanted: made[layer] = new
            if earlier: earlier[layer].append(new)
        return x

    def mixture(self, h):
        """The expected scaled embedding of the next token under head(h): (B,T,C) -> (B,T,C). Never holds all of (B,T,V)."""
        c, rows = self.config, h.reshape(-1, h.size(-1))
        n = max(1, ChunkedCrossEntropy.CHUNK // c.vocab_size)

        def mix(rows):
            logits, table = self.head(rows), self.wte.weight  # scaled after mixing: the table is far larger than the result
            scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
            if c.ponder_topk is None: return scores.softmax(-1).to(logits.dtype) @ table.to(logits.dtype) * c.embed_scale
            top = scores.topk(c.ponder_topk, -1)
            shares = top.values.softmax(-1).to(table.dtype)
            return F.embedding_bag(top.indices, table, per_sample_weights=shares, mode='sum') * c.embed_scale

        # recomputed in backward, or every step would keep its probabilities
        step = partial(checkpoint, mix, use_reentrant=False) if torch.is_grad_enabled() else mix
        return torch.cat([step(part) for part in rows.split(n)]).view_as(h)

    def hidden(self, idx, memory=None, jacobi=None):
        """
        Tokens (B,T) -> the hidden states (B,T,C) that predict their successors, as `config.ponder` and `config.halting` say.
        memory: from `new_memory`; the tokens then follow those it holds. jacobi: iterations of 'latent' (None: jacobi_iters).
        """
        c = self.config
        memory, begin = (memory, memory[0].tokens) if memory else ([None] * (c.ponder_steps + 1), 0)
        pos = torch.arange(begin, begin + idx.size(1), device=idx.device)
        if memory[0]: memory[0].tokens = begin + idx.size(1)
        self.steps, self.trace = None, []
        h = self.mechanism(self, self.embed(idx), pos, memory, c.jacobi_iters if jacobi is None else jacobi)
        return h.finish() if isinstance(h, Thinking) else h

    def new_memory(self, capacity, start=None):
        """Empty caches for `hidden`, for `capacity` tokens; start (B,): tokens of padding on the left of each row."""
        return new_caches(self.config, capacity, start, self.mechanism in (chain, *HALTING.values()), self.decode_layers is not None)

    def wide(self, module, h):
        """module(h), computed in the type of its weights without autocast, returned in fp32 or wider: it is compared with 1e-4."""
        with torch.autocast(h.device.type, enabled=False): out = module(h.to(next(module.parameters()).dtype))
        return out.to(torch.promote_types(out.dtype, torch.float32))

    @torch.no_grad()
    def probability(self, h, targets):
        """The probability (..) that hidden states (..,C) give to targets (..)."""
        n = max(1, ChunkedCrossEntropy.CHUNK // self.config.vocab_size)
        chunks = zip(h.reshape(-1, h.size(-1)).split(n), targets.reshape(-1, 1).split(n))
        return torch.cat([self.head(rows).float().softmax(-1).gather(1, y) for rows, y in chunks]).view(targets.shape)

    def head(self, h):
        """Hidden states (B,S,C) -> logits (B,S,V); rows of the table beyond n_tokens are -inf."""
        logits = self.lm_head(h)
        if self.config.n_tokens < self.config.vocab_size: logits[..., self.config.n_tokens:] = -math.inf
        return logits

    def loss(self, h, targets):
        """Mean cross-entropy in nats of hidden states (B,T,C) against targets (B,T); negative targets are ignored."""
        h, targets = h.reshape(-1, h.size(-1)), targets.reshape(-1)
        return ChunkedCrossEntropy.apply(h, self.lm_head.weight, targets, self.config.n_tokens, torch.is_grad_enabled())

    def forward(self, idx, targets=None, jacobi=None):
        """idx (B,T) -> (logits (B,T,V), None); targets (B,T), the next tokens: (None, mean loss in nats; training: plus `penalty`)."""
        T = self.config.block_size
        if idx.dim() != 2 or idx.size(1) > T: raise ValueError(f"tokens of shape {tuple(idx.shape)} must be (B,T), T up to block_size={T}")
        h = self.hidden(idx, jacobi=jacobi)
        if targets is None: return self.head(h), None
        loss = self.loss(h, targets) + (penalty(self, targets) if self.trace and self.training else 0)
        self.trace = []  # it would keep the step's graph alive
        return None, loss

    # ---- generation --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def stream(self, prompts, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seed=None, stop_token=None, exact=False):
        """
        Generate step by step; yields (token (B,), passes (B,)): the new token of each row and the passes (of `pause`, slots) it took.

        prompts: (B,T) tensor, or a list of B sequences of any lengths, none empty or longer than block_size.
        temperature 0 takes the likeliest token; top_k keeps the k likeliest, top_p the fewest that together have
        probability p. `seed` makes the draw repeatable on one device. A row that drew `stop_token` repeats it, and the stream
        ends when all rows have. `exact`, for 'latent': read the prompt token by token, not by Jacobi iterations. With
        halting, rows of a batch do not wait for each other; a position is yielded once all rows have it.

        Past block_size: when the window is full, its newer half is read afresh, as if it were the whole text. So each token is
        predicted from block_size / 2 to block_size tokens, as by `forward` on that window, for one slot more per token on average.
        """
        device, capacity = self.wte.weight.device, self.config.block_size
        tokens, start = self._left_pad(prompts, device)                     # (B,T), (B,) or None
        (B, n), first = tokens.shape, 0
        tokens = torch.cat((tokens, tokens.new_zeros(B, max_new_tokens)), 1)
        generator = torch.Generator(device).manual_seed(seed) if seed is not None else None
        done = torch.zeros(B, dtype=torch.bool, device=device)

        def draw(h, rows):                                                  # (r,C), which rows of the batch -> (r,)
            token = self._sample(self.head(h), temperature, top_k, top_p, generator)
            return token if stop_token is None else torch.where(done[rows], stop_token, token)

        decode = run_ahead if self.mechanism in HALTING.values() else run_in_step
        was_training = self.training
        self.eval()
        try:
            while n < tokens.size(1):                                       # one window: read what is there, then write until it is full
                end = min(first + capacity + 1, tokens.size(1))
                memory = self.new_memory(end - first - 1, None if start is None else (start - first).clamp(min=0))
                for part in tokens[:, first:n].split(1 if exact else n, 1): h = self.hidden(part, memory)
                for token, passes in decode(self, tokens[:, :end], n, h, memory, draw, stop_token):
                    yield token, passes
                    if stop_token is None: continue
                    done |= token == stop_token
                    if done.all(): return
                n, first = end, end - max(1, capacity // 2)
        finally:
            self.train(was_training)

    def generate(self, prompts, max_new_tokens, **options):
        """All of `stream`, with its options: (B,T) gives (B, T + new); a list gives tensors, each cut after its stop token."""
        stop, device = options.get('stop_token'), self.wte.weight.device
        rows = [torch.as_tensor(p, device=device) for p in prompts]
        new = [token for token, _ in self.stream(prompts, max_new_tokens, **options)]
        new = torch.stack(new, 1) if new else torch.zeros(len(rows), 0, dtype=torch.long, device=device)
        if isinstance(prompts, torch.Tensor): return torch.cat((prompts.to(device), new), 1)
        stops = [(row == stop).nonzero() if stop is not None else () for row in new]
        return [torch.cat((p, row[:s[0] + 1] if len(s) else row)) for p, row, s in zip(rows, new, stops)]

    def _left_pad(self, prompts, device):
        """Right-align prompts: tokens (B, longest), and how much padding is left of each row, (B,), or None for none."""
        rows = [torch.as_tensor(p, dtype=torch.long, device=device) for p in prompts]
        lengths = [len(row) for row in rows]
        if not rows or min(lengths) == 0: raise ValueError("an empty prompt: give at least one token, such as the end-of-text token")
        if max(lengths) > self.config.block_size:
            raise ValueError(f"a prompt of {max(lengths)} tokens does not fit into block_size={self.config.block_size}")
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side='left')
        # rotary attention sees only differences of positions, so rows shifted to the right need no positions of their own
        start = torch.tensor([max(lengths) - n for n in lengths], device=device)
        return tokens, start if min(lengths) < max(lengths) else None

    @staticmethod
    def _sample(logits, temperature, top_k, top_p, generator):
        """One token (B,) from logits (B,V)."""
        if temperature == 0: return logits.argmax(-1)
        logits = logits.float() / temperature
        if top_k is not None: logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:], -math.inf)
        if top_p is not None:
            ordered, order = logits.softmax(-1).sort(descending=True)
            likelier = ordered.cumsum(-1) - ordered  # a token stays if the likelier ones do not reach p without it
            drop = torch.zeros_like(order, dtype=torch.bool).scatter(1, order, likelier >= top_p)
            logits = logits.masked_fill(drop, -math.inf)
        p = logits.softmax(-1)  # what torch.multinomial does, minus its NaN check, for which the host waits twice (NaN: token 0)
        return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)

    # ---- accounting --------------------------------------------------------------------------------------------------

    def num_params(self):
        """Parameters, each counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T=None, training=True, jacobi=None):
        """
        FLOPs (2 per multiply-add) of one token in a sequence of T (None: block_size), forward and backward, or forward alone. With
        halting nobody halts; 'latent' iterates `jacobi` times (None: jacobi_iters, in training on average half a time less). Attention
        counts all T keys, as is usual, read or not. Left out: norms, activations, sources of earlier loops, recomputed blocks.
        """
        c, T, s, head = self.config, T or self.config.block_size, self.config.ponder_steps, self.lm_head.weight.numel()
        factor = 3 if training else 1                                       # backward is two forwards
        R = jacobi if jacobi is not None else max(c.jacobi_iters - training / 2, 0)  # train.py draws jacobi_iters or one less
        per_slot = sum(m.weight.numel() for m in self.h.modules() if isinstance(m, nn.Linear))
        sources = [len(c.sources(layer)) for layer in range(c.n_layer)]
        per_slot += 2 * sum(n + 1 for n in sources if n) * c.n_kv_head * c.head_dim
        # (slots per token, keys per slot in multiples of T) of every pass
        passes = {'none': [(1, 1)], 'embedding': [(1, 1)] * (s + 1), 'loop': [(1, 1)] * (s + 1), 'pause': [(s + 1, s + 1)],
                  'chain': [(1, k + 1) for k in range(s + 1)],
                  'latent': [(n + 1, n + 1) for n in range(s)] + [((s + 1) * (R + 1 if s else 1), s + 1)]}[c.ponder]
        width = c.head_dim + (8 if c.halting == 'mask' and s else 0)        # a key bias widens the heads
        trunk = sum(n * (per_slot + 2 * keys * T * c.n_layer * c.n_head * width) for n, keys in passes)  # 2: q k^T, weights times v
        decide = sum(p.numel() for name, p in self.named_parameters() if name.startswith(('gates.', 'router.')) and p.dim() == 2)
        decide *= {'mask': s + R + 1, 'router': s}.get(c.halting, 1)
        # a step's head, and mixing the table's rows; backward first recomputes both
        mixing = s * (head + (c.ponder_topk or c.vocab_size) * c.n_embd) if c.ponder == 'embedding' else 0
        p_k = s * head if c.halting == 'router' and training else 0         # the router's loss term, forward only
        return 2 * (factor * (trunk + head + decide) + (factor + 1 if training else 1) * mixing + p_k)
