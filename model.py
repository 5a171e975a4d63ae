"""
nanoPonder: a GPT, and the ideas that let it think more per token. All of them are in this file.

The plain model is a Qwen3-style decoder: RMSNorm in front of each branch, rotary positions,
QK-norm, grouped-query attention, SwiGLU, no biases. It has three parts. Depth-Attention works
inside the second; every other mechanism is a way to use it:

    x = gpt.embed(idx)          tokens (B,T)          -> embeddings (B,T,C)
    h = gpt.trunk(x, pos)       embeddings            -> hidden states (B,T,C)
    z = gpt.head(h)             hidden states         -> logits (B,T,V)

Read from top to bottom. After part 2 you have read a complete, ordinary GPT. It names some things
that come later: depth_attention, which does nothing in a plain model, PONDER and HALTING, and
new_mechanism, which for a plain model makes a `Plain`: one call of the trunk.

    1  settings             GPTConfig
    2  the plain GPT        RMSNorm, rotary positions, Attention, MLP, Block, GPT
    3  Depth-Attention      inside the trunk: values are mixed over layers
    4  pondering            for each token the trunk is called several times, or on several slots
    5  halting              each token takes as many of these passes as it needs

What comes from engine/ makes it fast, or gives the same result when a text is read in pieces as
when it is read at once: each function says which plain PyTorch it equals. Who may read whose keys
is said here by the papers' equations, and kept by the classes of engine/memory.py.

    B batch   T tokens   S slots (tokens, or tokens and their thoughts)   C n_embd   V vocab_size
    nh query heads   nkv key/value heads   hd head dimension   K ponder_steps
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from engine import flops, generate
from engine.attention import attend
from engine.checks import check_config
from engine.flops import Cost, Pass
from engine.inputs import check_batch
from engine.loss import chunked_cross_entropy, in_parts, probability_of, recompute
from engine.memory import (CausalMemory, ChainMemory, FrozenMemory, KVCache, LatestCache,
                           StepCache, StepMemory, ThoughtCache, new_caches, no_caches)
from engine.shapes import shapes_only
from engine.slots import Everyone, choose, real_tokens

# -------------------------------------------------------------------------------------------------
# 1  Settings


@dataclass
class GPTConfig:
    """Shape and toggles of a model; the defaults are the 360M row of the Depth-Attention paper."""
    vocab_size: int = 50304              # rows of the embedding table; a multiple of 64 is faster
    n_tokens: Optional[int] = None       # rows in use, the others are padding (None: all)
    block_size: int = 2048               # longest context, in tokens
    n_layer: int = 24                    # blocks
    n_head: int = 15                     # query heads
    n_kv_head: Optional[int] = None      # key/value heads (None: n_head)
    n_embd: int = 960                    # width of the residual stream
    head_dim: Optional[int] = None       # width of a head (None: n_embd / n_head)
    mlp_hidden: Optional[int] = 2560     # width inside the MLP (None: 8/3 n_embd, in steps of 64)
    rope_theta: float = 1e4              # base of the rotary frequencies
    norm_eps: float = 1e-5               # inside every RMSNorm
    qk_norm: bool = True                 # RMSNorm on each query and key head, before the rotation
    tie_embeddings: bool = False         # one table for the embedding and the output head
    embed_scale: Optional[float] = None  # factor on embeddings (None: as in the paper of the mode)
    init_std: Optional[float] = None     # std of the initial matrices (None: sqrt(0.4 / n_embd))
    dropout: float = 0.0                 # on embeddings, attention weights and both branches

    # Depth-Attention
    depth_attn: bool = False             # mix each layer's values with those of earlier layers
    depth_stride: Optional[int] = None   # the sources are layers 0, s, 2s, .. (None: n_layer / 2)
    depth_mode: str = 'softmax'          # or 'uniform': a plain average, the paper's ablation

    # pondering
    ponder: str = 'none'                 # 'embedding', 'latent', 'chain', 'loop' or 'pause'
    ponder_steps: int = 3                # K: extra passes, or slots, per token (0: one plain pass)
    ponder_topk: Optional[int] = None    # embedding: mix the k likeliest tokens (None: all)
    jacobi_iters: int = 3                # latent: R, see Latent; training draws R or R - 1

    # halting
    halting: str = 'none'                # 'gate' for embedding, 'mask' latent, 'router' chain
    halt_tau: float = 1e-4               # below this probability a step is not taken
    halt_lambda: Optional[float] = None  # weight of the loss term for fewer steps (None: default)
    halt_start: Optional[float] = None   # share of the run at which that term starts, and from
    halt_full: Optional[float] = None    # which it counts in full (None: gate, mask 0.4 and 0.48)
    halt_share: float = 0.1              # gate: the term averages at most this share, the lowest
    halt_beta: float = 10.0              # router: going on costs g p^beta, see Router

    def __post_init__(self):
        check_config(self, PONDER, HALTING)  # ValueError: which settings clash, and what to do
        if self.n_tokens is None:
            self.n_tokens = self.vocab_size
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.head_dim is None:
            self.head_dim = self.n_embd // self.n_head
        if self.mlp_hidden is None:
            self.mlp_hidden = 64 * math.ceil(8 / 3 * self.n_embd / 64)
        if self.init_std is None:
            self.init_std = math.sqrt(0.4 / self.n_embd)  # 0.02 at width 960
        if self.embed_scale is None:
            self.embed_scale = PONDER[self.ponder].embed_scale(self.n_embd)
        if self.depth_stride is None and self.depth_attn:
            self.depth_stride = max(1, self.n_layer // 2)
        if self.halt_lambda is None and self.halting != 'none':
            self.halt_lambda = HALTING[self.halting].default_lambda
        if self.halt_start is None and self.halting != 'none':
            self.halt_start = HALTING[self.halting].default_ramp[0]
        if self.halt_full is None and self.halting != 'none':
            self.halt_full = HALTING[self.halting].default_ramp[1]

    def sources(self, layer):
        """The earlier layers whose values Depth-Attention mixes into those of `layer`."""
        return range(0, layer, self.depth_stride) if self.depth_attn else range(0)

    def without_weights(self):
        """The GPT of these settings with shapes and no numbers: it needs no time and no memory."""
        with shapes_only():
            return GPT(self)


# -------------------------------------------------------------------------------------------------
# 2  The plain GPT


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        weight = self.weight.to(x.dtype)  # on mixed dtypes PyTorch would drop its fused kernel
        return F.rms_norm(x, weight.shape, weight, self.eps).to(x.dtype)


def rope_table(pos, head_dim, theta, dtype):
    """
    Rotary positions (arXiv 2104.09864): at position p, channels i and i + hd/2 are a pair that
    turns by the angle p theta^(-2i / hd). pos (S,) or (B,S) -> cos and sin, each (.., S, 1, hd);
    sin has its sign already, minus for the first channel of a pair.
    """
    wide_dtype = torch.promote_types(dtype, torch.float32)  # bf16 cannot tell position 257 from 256
    channel = torch.arange(0, head_dim, 2, device=pos.device, dtype=wide_dtype)
    frequency = theta ** (-channel / head_dim)                          # (hd/2,)
    angle = pos.to(wide_dtype)[..., None, None] * frequency             # (.., S, 1 head, hd/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rope(x, cos, sin):
    """Turn x (B,S,heads,hd): each pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    swapped = x.roll(x.size(-1) // 2, -1)  # (b, a): half as expensive as cutting and joining
    return torch.addcmul(x * cos, swapped, sin)  # x cos + swapped sin


class Attention(nn.Module):
    """Causal attention; n_head / n_kv_head query heads share each key/value head."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.depth_mode = config.depth_mode
        heads = config.n_head + 2 * config.n_kv_head  # q, k and v in one matmul
        self.c_attn = nn.Linear(config.n_embd, heads * config.head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm_late = nn.Identity()  # in its place in some released weights: engine/variant.py

    def forward(self, x, rope, sources, memory, mask):
        """
        x (B,S,C) -> y (B,S,C), and this layer's keys and (mixed) values for the layers above.
        rope       cos and sin of all positions
        sources    for Depth-Attention: (keys, values) of earlier layers. Plain: an empty list
        memory     holds what there is to read, such as a cache. Plain: only this pass's k and v
        mask       which keys each slot reads. Plain: None, which is causal
        """
        B, S, _ = x.shape
        nh, nkv, hd = self.n_head, self.n_kv_head, self.head_dim
        q, k, v = self.c_attn(x).view(B, S, nh + 2 * nkv, hd).split((nh, nkv, nkv), dim=2)
        q = apply_rope(self.q_norm(q), *rope).transpose(1, 2)       # (B, nh, S, hd)
        k = self.k_norm_late(apply_rope(self.k_norm(k), *rope)).transpose(1, 2)  # (B, nkv, S, hd)
        v = v.transpose(1, 2)                                       # (B, nkv, S, hd)

        v = depth_attention(q, k, v, sources, self.depth_mode)      # without sources: v itself
        keys, values = memory.update(self.layer, k, v)              # (B, nkv, all to read, hd)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, keys, values, mask, dropout)                  # softmax(q k^T / sqrt(hd)) v

        y = y.transpose(1, 2).reshape(B, S, nh * hd)                # heads side by side
        return self.c_proj(y), (k, v)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.mlp_hidden, bias=False)  # gate and up
        self.c_proj = nn.Linear(config.mlp_hidden, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.c_fc(x).chunk(2, dim=-1)
        return self.c_proj(F.silu(gate) * up)


class Block(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.ln_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rope, sources, memory, mask):
        y, keys_values = self.attn(self.ln_1(x), rope, sources, memory, mask)
        x = x + self.drop(y)
        x = x + self.drop(self.mlp(self.ln_2(x)))
        return x, keys_values


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.mechanism = new_mechanism(config)  # Plain: one call of the trunk
        self.init_weights()
        self.checkpoint_activations = False     # train.py: recompute each block in backward
        self.static_caches = False              # engine/hardware.py: caches for compiled decoding

    def init_weights(self):
        """Normal matrices; pondering models, like GPT-2, begin with small residual branches."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=self.config.init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if self.config.ponder != 'none':
            for block in self.h:
                block.attn.c_proj.weight.data /= math.sqrt(2 * self.config.n_layer)
                block.mlp.c_proj.weight.data /= math.sqrt(2 * self.config.n_layer)
        self.mechanism.init_weights()

    def forward(self, idx, targets=None, jacobi=None):
        """
        Tokens (B,T) -> (logits (B,T,V), None). With targets (B,T), the next tokens: (None, loss),
        the mean cross-entropy in nats, in training plus the mechanism's own term. Negative targets
        do not count. jacobi: see `hidden`. In the plain GPT this is

            x = self.embed(idx)
            for block in self.h:
                x = block(x)
            logits = self.lm_head(self.ln_f(x))
        """
        check_batch(idx, targets, jacobi, self.config)  # ValueError for other shapes and numbers
        h = self.hidden(idx, jacobi=jacobi)                             # (B,T,C)
        if targets is None:
            return self.head(h), None
        loss = self.loss(h, targets)
        return None, loss + self.mechanism.extra_loss(self, targets)

    def hidden(self, idx, memory=None, jacobi=None):
        """
        Tokens (B,T) -> the hidden states (B,T,C) that predict the next tokens.
        memory     a list, with what each pass may read. Caches from `new_memory`: these tokens
                   follow those that the caches hold. None: they are the whole text
        jacobi     only 'latent' and 'mask' read it: their R (None: config.jacobi_iters)
        """
        if memory is None:
            memory = no_caches(self.mechanism, self.config.n_layer)
        self.mechanism.jacobi = self.config.jacobi_iters if jacobi is None else jacobi
        pos = memory.begin(*idx.shape, idx.device)      # (T,): from 0, or on from what caches hold
        x = self.embed(idx)
        return self.mechanism(self, x, pos, memory)  # Plain: self.trunk(x, pos, memory[0])

    def embed(self, idx):
        """Tokens (B,T) -> embeddings (B,T,C)."""
        return self.drop(self.wte(idx) * self.config.embed_scale)

    def trunk(self, x, pos, memory=None):
        """
        All blocks and the final norm: x (B,S,C) at rotary positions pos (S,) or (B,S) -> (B,S,C).
        Positions may repeat. A slot reads itself and all before it, or what `memory` says.
        """
        return self.ln_f(self.blocks(x, pos, memory))

    def blocks(self, x, pos, memory=None, layers=None, earlier=None):
        """
        The trunk without the final norm.
        layers     the blocks to run (None: all), for mechanisms that repeat only some of them
        earlier    only Loop passes it: for each layer the list of (keys, values) that it made in
                   the loops before, as more sources for Depth-Attention; this loop appends its own
        """
        if memory is None:
            memory = CausalMemory()
        if layers is None:
            layers = range(self.config.n_layer)
        mask = memory.mask(x.size(1), x.device)
        rope = rope_table(pos, self.config.head_dim, self.config.rope_theta, x.dtype)
        wanted = {j for layer in layers for j in self.config.sources(layer)}
        made = {}  # of the layers that later ones want: (keys, values)
        for layer in layers:
            sources = [made[j] for j in self.config.sources(layer) if j in made]
            if earlier is not None:
                sources = earlier[layer] + sources
            block = self.h[layer]
            if self.checkpoint_activations and self.training:
                block = recompute(block)
            x, keys_values = block(x, rope, sources, memory, mask)
            if layer in wanted:
                made[layer] = keys_values
            if earlier is not None:
                earlier[layer].append(keys_values)
        return x

    def head(self, h):
        """Hidden states (B,S,C) -> logits (B,S,V), -inf for rows of the table that are padding."""
        logits = self.lm_head(h)
        if self.config.n_tokens < self.config.vocab_size:
            logits[..., self.config.n_tokens:] = -math.inf
        return logits

    def loss(self, h, targets):
        """F.cross_entropy(head(h), targets) over targets >= 0, without ever holding all logits."""
        rows, weight = h.reshape(-1, h.size(-1)), self.lm_head.weight
        return chunked_cross_entropy(rows, weight, targets.reshape(-1), self.config.n_tokens)

    # generation and accounting: engine/ does it

    def new_memory(self, capacity, start=None):
        """Empty caches for `capacity` tokens; start (B,): tokens of padding on the left of rows."""
        return new_caches(self.mechanism, self.config.n_layer, capacity, start, self.static_caches)

    def stream(self, prompts, max_new_tokens, **options):
        """Generate: yields (token (B,), passes (B,)), step by step; see engine/generate.py."""
        return generate.stream(self, prompts, max_new_tokens, **options)

    def generate(self, prompts, max_new_tokens, **options):
        """All of `stream`: (B,T) gives (B, T + new), a list of prompts a list of tensors."""
        return generate.generate(self, prompts, max_new_tokens, **options)

    def num_params(self):
        """Parameters, each counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T=None, training=True, jacobi=None):
        """FLOPs of one token in a text of T tokens, see engine/flops.py."""
        return flops.per_token(self, T, training, jacobi)


# -------------------------------------------------------------------------------------------------
# 3  Depth-Attention: Cross-Layer Value Mixing for Language Models (arXiv 2606.05014)
#
# Before layer l attends over the sequence, it attends over depth, at one position: its query scores
# its own key and those of a few earlier layers j in S(l), and the softmax of the scores mixes their
# values into the layer's value. Attention over the sequence then reads the mixed values.
#
#     a_{l,j} = softmax_j( q_l . k_j / sqrt(hd) )              j in S(l), and l itself      (Eq. 2)
#     v~_l    = a_{l,l} v_l + sum_{j in S(l)} a_{l,j} v~_j     earlier ones mixed already   (Eq. 3)
#     o_l     = causal attention of (q_l, k_l, v~_l)           keys stay as they are        (Eq. 4)
#
# S(l) is every layer below l that is a multiple of the stride s, by default n_layer / 2, see
# GPTConfig.sources.
# Layer 0 has no source. q and k are those of sequence attention, after norm and rotation: at one
# position both are turned alike, so the rotation cancels.
#
# Cost: 4 (|S(l)| + 1) nkv hd FLOPs per token and layer, 0.03 % of the 360M model; no parameter. The
# cache stores v~ in the place of v, so it does not grow.
# Unlike in the authors' code, keys are normed before they are rotated (the paper's order), not
# after, so that weights depend on no absolute position; and the cache holds v~, which makes
# decoding exact. Sources are counted from layer 0, as in their code; one sentence of the paper
# counts back from each layer. Drawn in docs/drawings/depth_attention.svg.


def depth_attention(q, k, v, sources, mode='softmax'):
    """
    The mixed values v~ (B, nkv, S, hd) of a layer with q (B, nh, S, hd) and k, v (B, nkv, S, hd).
    sources: [(k_j, v~_j), ..] of the layers in S(l). Queries that share a key head are averaged.
    """
    if not sources:
        return v
    values = [v_j for _, v_j in sources] + [v]
    if mode == 'uniform':
        return sum(values) / len(values)
    keys = [k_j for k_j, _ in sources] + [k]
    if q.size(1) != k.size(1):
        q = q.unflatten(1, (k.size(1), -1)).mean(2)                 # (B, nkv, S, hd)
    if k.size(2) == 1 and not torch.compiler.is_compiling():
        # a single slot: the layers are a sequence, and one query reads all of it
        return attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2))

    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = [(q * k_j).sum(-1, keepdim=True, dtype=dtype) for k_j in keys]
    scores = torch.cat(scores, dim=-1) * k.size(-1) ** -0.5         # (B, nkv, S, sources + 1)
    a = scores.softmax(-1).to(v.dtype).split(1, dim=-1)             # (Eq. 2)
    mixed = a[0] * values[0]
    for a_j, v_j in zip(a[1:], values[1:]):  # (Eq. 3); stacked, backward would keep copies of all
        mixed = torch.addcmul(mixed, a_j, v_j)
    return mixed                                                    # (B, nkv, S, hd)


# -------------------------------------------------------------------------------------------------
# 4  Pondering: several passes, or several slots, for each token before the next one is predicted


class Mechanism(nn.Module):
    """
    What happens between embed(idx) and head(h). A paper's class says in `forward` how it uses
    gpt.trunk, and holds its own weights, its term of the loss and its cost. The code counts passes
    k from 0 to K.
    """
    memory = CausalMemory   # what a pass may read in training and evaluation: engine/memory.py
    cache = KVCache         # the same in generation
    one_cache = False       # False: each pass has its own. True: one, up to K + 1 slots per token
    halts = False           # whether tokens stop by themselves
    skips = False           # whether training, too, skips tokens that stopped: shapes then vary
    settings = ('ponder_steps',)  # what it reads of GPTConfig, beside the shape

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.progress = 1.0         # share of the training run that is done: train.py sets it
        self.dense = False          # True: skip nobody, so that no shape varies; caches skip anyway
        self.jacobi = None          # latent, mask: their R; GPT.hidden sets it
        self.jacobi_change = None   # latent: how far one more sweep would have moved the thoughts
        self.passes = None          # halting: passes that each token took in the last call, (B,T)

    @property
    def steps(self):
        """K"""
        return self.config.ponder_steps

    @staticmethod
    def embed_scale(C):
        """
        The default of GPTConfig.embed_scale. Here scaled embeddings begin with RMS 1, like hidden
        states: sqrt(2.5 C) times an init_std of sqrt(0.4 / C).
        """
        return math.sqrt(2.5 * C)

    def forward(self, gpt, x, pos, memory):
        """
        Embeddings x (B,T,C) at positions pos (T,) -> the hidden states (B,T,C) that predict the
        next tokens. Pass k gives memory[k] to gpt.trunk, with one_cache memory[0].
        """
        raise NotImplementedError

    def extra_loss(self, gpt, targets):
        """What training adds to the loss; targets (B,T) as in GPT.forward."""
        return 0.0

    def cost(self, gpt, R):
        """
        A Cost, in multiply-adds (FLOPs are twice that), with all passes taken: engine/flops.py.
        R: as in Latent, perhaps a mean.
        """
        return Cost([Pass()] * (self.steps + 1))

    def can_take(self, steps):
        """
        Whether a trained model has the weights for that many steps: sample.py --ponder_steps. One
        with halting and no steps has none for more.
        """
        return self.config.halting == 'none' or steps == 0

    def init_weights(self):
        """Overrides the initial values of its own weights, where GPT.init_weights is not right."""


class Plain(Mechanism):
    """The plain GPT: one pass."""
    steps = 0  # whatever ponder_steps says
    settings = ()

    @staticmethod
    def embed_scale(C):
        return 1.0

    def forward(self, gpt, x, pos, memory):
        return gpt.trunk(x, pos, memory[0])


class Embedding(Mechanism):
    """
    PonderLM: Pretraining Language Models to Ponder in Continuous Space (arXiv 2505.20674)

    The mean embedding of the next token is added to the input, and the trunk runs again:

        P_j     = softmax(head(trunk(E_j)))     what the model would say after j steps      (B,T,V)
        E_{j+1} = E_j + P_j W                   W: the table of embeddings, scaled          (B,T,C)
        logits  = head(trunk(E_K))              the loss reads the last pass only

    Cost: K + 1 passes, and per step 4 V C more FLOPs forward: the head, and a matmul to mix.
    Unlike in the authors' code, the softmax is fp32, padding in the vocabulary gets no mass, and
    the input is not multiplied by K (a flag of theirs that the paper does not have). All tokens are
    mixed, as in their code; the paper's text mixes only the 100 likeliest (ponder_topk).
    Drawn in docs/drawings/embedding.svg.
    """
    settings = ('ponder_steps', 'ponder_topk')

    @staticmethod
    def embed_scale(C):
        return math.sqrt(C)  # scaled embeddings begin with RMS 0.63

    def forward(self, gpt, x, pos, memory):
        for step in range(self.steps):
            h = gpt.trunk(x, pos, memory[step])
            x = x + mixture(gpt, h)
        return gpt.trunk(x, pos, memory[-1])

    def cost(self, gpt, R):
        mixed_rows = self.config.ponder_topk or self.config.vocab_size
        mixing = gpt.lm_head.weight.numel() + mixed_rows * self.config.n_embd
        return Cost([Pass()] * (self.steps + 1), recomputed=self.steps * mixing)


def mixture(gpt, h):
    """P W: the mean embedding of the next token under head(h), (B,T,C) -> (B,T,C)."""
    return in_parts(partial(mean_embedding, gpt), h, gpt.config.vocab_size)  # never all of (B,T,V)


def mean_embedding(gpt, h):
    """The same for rows (n,C) -> (n,C)."""
    config, table = gpt.config, gpt.wte.weight
    logits = gpt.head(h)                                                # (n,V)
    if config.ponder_topk is None:
        p = at_least_fp32(logits).softmax(-1).to(logits.dtype)
        return p @ table.to(p.dtype) * config.embed_scale  # scaled last: the table is far larger
    top = at_least_fp32(logits).topk(config.ponder_topk, -1)
    p = top.values.softmax(-1).to(table.dtype)
    mean = F.embedding_bag(top.indices, table, per_sample_weights=p, mode='sum')
    return mean * config.embed_scale


def at_least_fp32(x):
    """x in fp32, or in float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Latent(Mechanism):
    """
    PonderLM-2: Pretraining LLM with Latent Thoughts in Continuous Space (arXiv 2509.23184)

    K thoughts follow each token, at its position; each is what the trunk made of the slot before:

        x_0 z_{0,1} .. z_{0,K}  x_1 z_{1,1} ..          z_{t,k} = trunk(..) at the slot before it

    What comes out of a token's last slot predicts the next token. Attention is causal over the flat
    sequence, so a token's thoughts depend on all slots before them: the exact way is sequential.
    Training solves this by Jacobi iteration: guess all thoughts, run the trunk over all slots, take
    what comes out as the next guess. For K = 2:

        sweep 0             x_t                 guesses z_1
        sweep 1             x_t  z_1            renews z_1, guesses z_2
        sweeps 2 .. R + 1   x_t  z_1  z_2       renew both
        the last            x_t  z_1  z_2       gives the output, at the slot of z_2

    z_{t,k} is exact after t K + k sweeps.

    Cost: K (K + 1) / 2 + (R + 1) (K + 1) slots per token, which read up to K + 1 times the keys; in
    decoding K + 1 passes of one slot. Unlike in the authors' code, R is drawn for each optimizer
    step, not for each forward; and a prompt can be read exactly (`exact` in engine/generate.py).
    Drawn in docs/drawings/latent.svg.
    """
    one_cache = True
    settings = ('ponder_steps', 'jacobi_iters')

    def forward(self, gpt, x, pos, memory):
        K, memory = self.steps, memory[0]
        if memory.cached and x.size(1) == 1:  # decoding: the recursion itself
            for _ in range(K + 1):
                x = gpt.trunk(x, pos, memory)
            return x

        thoughts = []
        for _ in range(K + self.jacobi if K > 0 else 0):
            h = self.sweep(gpt, [x, *thoughts], pos, memory)
            thoughts = h[:K]                            # z_{k+1} is what came out of slot k
        h = self.sweep(gpt, [x, *thoughts], pos, memory)
        if K > 0 and not self.training:
            change = torch.stack(h[:K]) - torch.stack(thoughts)         # 0 once they are exact
            self.jacobi_change = change.detach().square().mean().sqrt()
        return h[K]

    def sweep(self, gpt, slots, pos, memory, bias=None):
        """
        A pass over n slots of each token, x_0 z_{0,1} .. x_1 z_{1,1} ..: [(B,T,C)] * n -> the
        hidden states of each.
        bias (B, T n): added to all scores against these slots, in every layer.
        """
        n = len(slots)
        x = torch.stack(slots, dim=2).flatten(1, 2)                     # (B, T n, C)
        memory.rewind(n)  # n slots per token follow; what the sweep before left was a guess
        if bias is not None:
            memory.add_bias(bias)
        h = gpt.trunk(x, pos.repeat_interleave(n), memory)
        return h.unflatten(1, (-1, n)).unbind(2)                        # n times (B,T,C)

    def cost(self, gpt, R):
        K = self.steps
        first = [Pass(slots=n, keys=n) for n in range(1, K + 1)]
        whole_sweeps = R + 1 if K > 0 else 1
        return Cost(first + [Pass(slots=(K + 1) * whole_sweeps, keys=K + 1)])


class Chain(Mechanism):
    """
    Pretraining with Token-Level Adaptive Latent Chain-of-Thought (arXiv 2602.08220), its arm of
    fixed length; Router is the adaptive one. The paper counts k from 1.

        z_t^(1)   = trunk at slot (t, 1), read from the token's embedding
        z_t^(k+1) = trunk at slot (t, k+1), read from z_t^(k)                         k = 1 .. K
        slot (t, k) sees slot (t', k') if and only if t' <= t and k' <= k                (Eq. 2)

    Step k never looks at later steps, so all tokens take it at once: exact, in parallel, without
    iteration, and the keys of earlier steps are computed once.

    Cost: K + 1 passes, whose attention reads 1, 2, .. K + 1 times as many keys.
    Drawn in docs/drawings/chain.svg.
    """
    memory = ChainMemory
    cache = StepCache
    one_cache = True

    def forward(self, gpt, x, pos, memory):
        memory = memory[0]
        everyone = Everyone(real_tokens(x, pos, memory))  # all tokens, but not the padding
        for k in range(self.steps + 1):
            memory = memory.open(everyone, pos, k)  # for this pass: it reads passes up to k
            x = gpt.trunk(x, pos, memory)
        return x

    def cost(self, gpt, R):
        return Cost([Pass(keys=k + 1) for k in range(self.steps + 1)])


class Loop(Mechanism):
    """
    The looped Transformer, a baseline of the papers: all blocks K + 1 times in a row, the final
    norm once. With depth_attn, what the same layer made in earlier loops is a source too, as in
    Depth-Attention's paper. Cost: K + 1 passes.
    Drawn in docs/drawings/loop.svg.
    """

    def forward(self, gpt, x, pos, memory):
        earlier = [[] for _ in gpt.h] if self.config.depth_attn else None
        for one_pass in memory:
            x = gpt.blocks(x, pos, one_pass, earlier=earlier)
        return gpt.ln_f(x)


class Pause(Mechanism):
    """
    Pause tokens, a baseline of the papers: K copies of one learned embedding follow each token, at
    its position, and the last of them predicts the next token. Cost: one pass of K + 1 slots per
    token, each of which reads K + 1 times as many keys.
    Drawn in docs/drawings/pause.svg.
    """
    one_cache = True

    def __init__(self, config):
        super().__init__(config)
        if config.ponder_steps > 0:
            self.pause = nn.Parameter(torch.randn(config.n_embd) * config.init_std)

    @staticmethod
    def embed_scale(C):
        return math.sqrt(C)  # scaled embeddings begin with RMS 0.63

    def forward(self, gpt, x, pos, memory):
        n = self.steps + 1
        slots = [x]
        for _ in range(self.steps):
            slots.append((self.pause * self.config.embed_scale).expand_as(x))
        x = torch.stack(slots, dim=2).flatten(1, 2)                     # (B, T n, C)
        h = gpt.trunk(x, pos.repeat_interleave(n), memory[0])
        return h[:, n - 1::n]                                           # (B,T,C)

    def cost(self, gpt, R):
        return Cost([Pass(slots=self.steps + 1, keys=self.steps + 1)])

    def can_take(self, steps):
        return steps == 0 or hasattr(self, 'pause')


PONDER = {'none': Plain, 'embedding': Embedding, 'latent': Latent, 'chain': Chain, 'loop': Loop,
          'pause': Pause}


# -------------------------------------------------------------------------------------------------
# 5  Halting: three of these modes, where each token takes as many passes as it needs


@dataclass
class Thinking:
    """What tokens carry from pass to pass: (B,T,..), or (B,n,..) of the n that take this pass."""
    x: torch.Tensor         # (B,T,C)  the input of its next pass
    out: torch.Tensor       # (B,T,C)  the output so far: complete once the token stops
    go_on: torch.Tensor     # (B,T)    whether another pass comes: a stopped token never resumes


class Halting(Mechanism):
    """
    A mechanism whose tokens stop by themselves. A subclass says how they begin, what one pass does,
    and what training adds to the loss; the loop is here. (Mask runs it only when it decodes.)
    """
    one_cache = True
    halts = True
    needs = None            # the setting of `ponder`
    default_lambda = None   # of halt_lambda
    default_ramp = (0.4, 0.48)  # of halt_start and halt_full

    def __init__(self, config):
        super().__init__(config)
        self.trace = []     # what `penalty` needs: (slots, new state) of each pass over a text

    def start(self, x, go_on):
        """The state before the first pass, of embeddings x (B,T,C); go_on (B,T): who takes it."""
        raise NotImplementedError

    def step(self, gpt, state, k, pos, memory):
        """
        Pass k of the tokens in `state`: their new state. k is a number for the loop below. Where
        rows of a batch write ahead of each other (engine/generate.py), it is a tensor (B,1).
        """
        raise NotImplementedError

    def penalty(self, gpt, targets, trace):
        """The term of the loss that asks for fewer passes."""
        raise NotImplementedError

    def forward(self, gpt, x, pos, memory):
        """Passes until every token has had enough, K + 1 at most."""
        memory = memory[0]
        leave_out = memory.cached or (self.skips and not self.dense)
        state = self.start(x, go_on=real_tokens(x, pos, memory))
        self.passes = torch.zeros_like(state.go_on, dtype=torch.long)   # (B,T)
        self.trace = []
        for k in range(self.steps + 1):
            if leave_out and not state.go_on.any():
                break
            self.passes = self.passes + state.go_on
            slots = choose(state.go_on, leave_out)      # who takes pass k (or all, to no effect)
            memory = memory.open(slots, pos, k)         # what this pass may read
            new = self.step(gpt, slots.take(state), k, slots.take(pos), memory)
            state = slots.put(state, new)               # only where state.go_on
            if not memory.cached:
                self.trace.append((slots, replace(new, out=None)))  # without `out`, to save memory
        return state.out.to(x.dtype)

    def extra_loss(self, gpt, targets):
        trace, self.trace = self.trace, []  # kept longer, it would hold the graph in memory
        return self.penalty(gpt, targets, trace) if self.training else 0.0

    def decisions(self):
        """
        The values that decided, [(B,T), ..]: of each pass over the last text that was read without
        targets; of Mask, of each number of thoughts.
        """
        return []

    def ramp(self):
        """0 until halt_start, 1 from halt_full on: shares of the training run."""
        start, full = self.config.halt_start, self.config.halt_full
        if self.progress >= full:
            return 1.0
        if self.progress <= start:
            return 0.0
        return (self.progress - start) / (full - start)


def in_fp32(module, h):
    """module(h) without autocast, as fp32: the result is compared with halt_tau, 1e-4."""
    with torch.autocast(h.device.type, enabled=False):
        weight_dtype = next(module.parameters()).dtype
        return at_least_fp32(module(h.to(weight_dtype)))


@dataclass
class GateState(Thinking):
    s: torch.Tensor         # (B,T)    s^i, the gate after its last pass; `out` is its h^i


class Gate(Halting, Embedding):
    """
    AdaPonderLM: Gated Pondering Language Models with Token-Wise Adaptive Depth (arXiv 2603.01914)

    PonderLM's passes (from Embedding: its scale and cost), with a gate after each that scales the
    next step, or ends the token's pondering:

        s^i     = sigmoid(MLP_i(h^i))            a gate after every pass but the last      (2), (3)
        m^{i+1} = m^i and s^i >= tau             who takes another pass                    (4), (5)
        E^{i+1} = E^i + m^{i+1} s^i P^i W        PonderLM's step, scaled by the gate     (6) to (9)
        a token with m^i = 0 keeps the K, V of its last pass, in every layer                   (10)

    The loss gains halt_lambda times the mean of the lowest gates (13), a share of all that grows to
    halt_share from halt_start to halt_full (14). Before halt_start nobody halts in training:
    otherwise cross-entropy alone would shut the gates for good.

    Cost: that of Embedding in training, and 8 C^2 FLOPs per gate; in generation the passes taken.
    No public code. Where the paper is silent: a stopped token's output is the hidden state of its
    last pass (training computes later ones, generation does not); (13) also averages the gates
    that training still computes for it; GELU; gates start near sigmoid(4) = 0.98, as PonderLM.
    Drawn in docs/drawings/gate.svg.
    """
    memory = FrozenMemory   # (10)
    cache = LatestCache     # (10), in generation
    needs = 'embedding'
    default_lambda = 0.1

    def __init__(self, config):
        super().__init__(config)
        C = config.n_embd
        self.gates = nn.ModuleList()
        for _ in range(config.ponder_steps):
            self.gates.append(nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, 1)))

    def init_weights(self):
        for gate in self.gates:
            nn.init.constant_(gate[-1].bias, 4.0)

    def start(self, x, go_on):
        s = at_least_fp32(x.new_zeros(x.shape[:2]))
        return GateState(x=x, out=torch.zeros_like(x), go_on=go_on, s=s)

    def step(self, gpt, state, k, pos, memory):
        x, m = state.x, state.go_on
        numbers = distinct(k)
        if numbers != [0]:                                              # not in the first pass
            gated = (m * state.s)[..., None] * mixture(gpt, state.out)
            x = x + gated.to(x.dtype)                                   # (6) to (9)
        h = gpt.trunk(x, pos, memory)
        s = at_least_fp32(h.new_zeros(h.shape[:2]))                     # (2), (3); 0 after the last
        for i in numbers:
            if i < self.steps:
                s = s + (k == i) * in_fp32(self.gates[i], h).squeeze(-1).sigmoid()
        m = m & (k < self.steps)
        if not self.training or self.progress >= self.config.halt_start:
            m = m & (s >= self.config.halt_tau)                         # (4), (5)
        return GateState(x=x, out=h, go_on=m, s=s)

    def decisions(self):
        return [said.s for _, said in self.trace[:self.steps]]

    def penalty(self, gpt, targets, trace):
        """halt_lambda times the mean of the lowest gates."""
        counts = targets >= 0                                           # (B,T)
        gates = torch.stack([said.s for _, said in trace[:self.steps]])  # (K,B,T)
        gates = gates.masked_fill(~counts, math.inf).flatten().sort().values
        share = self.ramp() * self.config.halt_share
        n = (share * self.steps * counts.sum()).floor()
        lowest = torch.arange(len(gates), device=gates.device) < n
        mean = gates.where(lowest, 0.0).sum() / n.clamp(min=1)  # of gates[:n]; n stays on the GPU
        return self.config.halt_lambda * mean

    def cost(self, gpt, R):
        return replace(super().cost(gpt, R), decisions=flops.linear_weights(self.gates))

    def can_take(self, steps):
        return steps <= len(self.gates)


def distinct(k):
    """The pass numbers that occur in k: one over a text, in generation perhaps several."""
    return [k] if isinstance(k, int) else k.unique().tolist()


@dataclass
class MaskState(Thinking):
    s: torch.Tensor         # (B,T,K+1)  probability that it needs exactly k thoughts
    log_w: torch.Tensor     # (B,T,K+1)  log of the probability that it needs at least k


class Mask(Halting, Latent):
    """
    PonderLM-3: Adaptive Token-Wise Pondering with Differentiable Masking (arXiv 2603.02023)

    A router decides, after a token's own slot, how many of PonderLM-2's thoughts it needs (from
    Latent: its scale, cost and `sweep`). The others fade out in training, else they are hidden:

        s_t     = softmax(router(h_t^(0)))       how many thoughts token t needs, K + 1 outcomes
        w_{t,k} = sum_{j >= k} s_{t,j}           probability that thought k is needed; w_{t,0} = 1
        scores of key (t, k), in every layer, += log w_{t,k}
        output  = sum_k s_{t,k} h_t^(k)          h_t^(k): hidden state at slot (t, k)

    A text is read by sweeps over all slots, each of which refreshes s. Outside of training, slots
    with w < tau are hidden in the next sweep and from the output; s is not scaled back to a sum of
    1. Decoding does not compute them. The loss gains halt_lambda times the expected number of
    thoughts, from halt_start on; this term is ours.

    Cost: that of Latent in training; in decoding 1 + (the number of thoughts with w >= tau) slots.
    No public code, and the text of the paper was not available to us: the equations are those of
    its figure and of a reader's notes.
    Drawn in docs/drawings/mask.svg.
    """
    cache = ThoughtCache
    needs = 'latent'
    default_lambda = 0.01

    def __init__(self, config):
        super().__init__(config)
        self.router = nn.Linear(config.n_embd, config.ponder_steps + 1)

    def forward(self, gpt, x, pos, memory):
        if memory[0].cached and x.size(1) == 1:  # decoding: slot by slot, see `step`
            return super().forward(gpt, x, pos, memory)

        K, memory = self.steps, memory[0]
        log_w = at_least_fp32(x.new_zeros(*x.shape[:2], K + 1))                  # (B,T,K+1)
        thoughts = []
        for _ in range(K + self.jacobi + 1):
            bias = log_w[..., :len(thoughts) + 1].flatten(1)            # (B, T n)
            if not self.training:  # hidden, but still computed: the next sweep may want it again
                bias = bias.masked_fill(bias < self.log_tau(), -math.inf)
            h = self.sweep(gpt, [x, *thoughts], pos, memory, bias.to(x.dtype))
            s, log_w = self.route(h[0])
            thoughts = h[:K]

        kept = (log_w >= self.log_tau()) & real_tokens(x, pos, memory)[..., None]
        self.passes = kept.sum(-1)                                      # (B,T)
        self.trace = [s]  # all that its penalty needs
        if memory.cached:
            memory.drop_hidden()
        if not self.training:
            s = s * kept
        out = sum(s[..., k, None] * h[k] for k in range(K + 1))
        return out.to(x.dtype)

    def route(self, h):
        """Hidden states (B,T,C) of the tokens' own slots -> s and log w, each (B,T,K+1)."""
        log_s = in_fp32(self.router, h).log_softmax(-1)
        log_w = log_s.flip(-1).logcumsumexp(-1).flip(-1)                # sums over j >= k, in logs
        return log_s.exp(), F.pad(log_w[..., 1:], (1, 0))               # log w_0 is exactly 0

    def log_tau(self):
        return math.log(min(max(self.config.halt_tau, 1e-300), 1))

    def start(self, x, go_on):
        zeros = at_least_fp32(x.new_zeros(*x.shape[:2], self.steps + 1))
        out = torch.zeros_like(x, dtype=zeros.dtype)
        return MaskState(x=x, out=out, go_on=go_on, s=zeros, log_w=zeros)

    def step(self, gpt, state, k, pos, memory):
        k = torch.as_tensor(k, device=state.x.device).expand_as(state.go_on)
        memory.add_bias(pick(state.log_w, k).to(state.x.dtype))
        h = gpt.trunk(state.x, pos, memory)                             # (B,1,C)
        s, log_w = self.route(h)
        first = (k == 0)[..., None]  # the router is asked once
        s, log_w = torch.where(first, s, state.s), torch.where(first, log_w, state.log_w)
        next_k = (k + 1).clamp(max=self.steps)
        go_on = state.go_on & (k < self.steps) & (pick(log_w, next_k) >= self.log_tau())
        out = state.out + pick(s, k)[..., None] * h
        return MaskState(x=h, out=out, go_on=go_on, s=s, log_w=log_w)

    def decisions(self):
        return self.trace[0].unbind(-1)                                 # of 0, 1, .. K thoughts

    def penalty(self, gpt, targets, trace):
        """halt_lambda times the mean number of thoughts expected, sum_{k >= 1} w_{t,k}."""
        [s] = trace                                                     # (B,T,K+1)
        counts = targets >= 0                                           # (B,T)
        expected = (s * torch.arange(self.steps + 1, device=s.device)).sum(-1)
        mean = (expected * counts).sum() / counts.sum().clamp(min=1)
        return self.config.halt_lambda * self.ramp() * mean

    def cost(self, gpt, R):
        cost = super().cost(gpt, R)
        passes = [replace(one, key_bias=True) for one in cost.passes]
        routed = flops.linear_weights(self.router) * (self.steps + R + 1)
        return Cost(passes, decisions=routed)

    def can_take(self, steps):
        return steps == self.steps


def pick(values, k):
    """values (B,T,K+1) at k (B,T) -> (B,T)."""
    return values.gather(-1, k[..., None]).squeeze(-1)


@dataclass
class RouterState(Thinking):
    reach: torch.Tensor     # (B,T)    probability of getting to its next pass
    g: torch.Tensor         # (B,T)    probability of going on after its last pass; x is its z


class Router(Halting, Chain):
    """
    Pretraining with Token-Level Adaptive Latent Chain-of-Thought (arXiv 2602.08220)

    A chain (from Chain: its scale and cost) that each token leaves when its probability of getting
    further is small. The paper counts k from 1:

        g_t^(k)   = sigmoid(router(z_t^(k))), 0 after the last step    whether to go on          (3)
        reach^(1) = 1,  reach^(k+1) = reach^(k) g^(k)                  probability of step k + 1 (4)
        K*        = the last step with reach >= tau                    later ones do not happen  (6)
        weight^(k) = reach (1 - g) before K*, reach at K*                                 (5), (7)
        output    = sum_k weight^(k) z^(k)                                                       (8)
        loss     += halt_lambda mean_t sum_{k <= K*} g^(k) p_k^beta                        (9), (10)
                    p_k: the right token's probability after step k, a constant for gradients

    With halt_start the last term waits until the model has learned something; the paper has it from
    the first step on.

    Cost: the passes of Chain that are taken, in training too, where p_k takes a head per step.
    After the last pass nobody goes on, whatever g says: it is as if g were 0. No public code. Where
    the paper is silent: tau is 1e-4 as in the others, embeddings are scaled as in PonderLM-2, the
    router starts around 1/2, and we average over t.
    Drawn in docs/drawings/router.svg.
    """
    memory = StepMemory
    skips = True
    needs = 'chain'
    default_lambda = 0.4
    default_ramp = (0.0, 0.0)   # the whole run

    def __init__(self, config):
        super().__init__(config)
        self.router = nn.Linear(config.n_embd, 1)

    def start(self, x, go_on):
        reach = at_least_fp32(x.new_ones(x.shape[:2]))
        out = torch.zeros_like(x, dtype=reach.dtype)
        return RouterState(x=x, out=out, go_on=go_on, reach=reach, g=torch.zeros_like(reach))

    def step(self, gpt, state, k, pos, memory):
        z = gpt.trunk(state.x, pos, memory)
        g = in_fp32(self.router, z).squeeze(-1).sigmoid()               # (3)
        next_reach = state.reach * g                                    # (4)
        go_on = state.go_on & (k < self.steps) & (next_reach >= self.config.halt_tau)   # (6)
        weight = torch.where(go_on, state.reach * (1 - g), state.reach)  # (5), (7)
        out = state.out + weight[..., None] * z                         # (8)
        return RouterState(x=z, out=out, go_on=go_on, reach=next_reach, g=g)

    def decisions(self):
        nothing = self.trace[0][1].g.new_zeros(self.passes.shape)
        return [slots.put(nothing, said.g) for slots, said in self.trace[:self.steps]]

    def penalty(self, gpt, targets, trace):
        """halt_lambda times the mean over tokens of sum_k g^(k) p_k^beta."""
        total = 0.0
        for slots, said in trace[:self.steps]:
            target = slots.take(targets)                                # (B,n)
            counts = slots.valid & (target >= 0)
            p = probability_of(gpt.head, said.x, target.clamp(min=0), self.config.vocab_size)
            total = total + (said.g * p ** self.config.halt_beta * counts).sum()
        mean = total / (targets >= 0).sum().clamp(min=1)
        return self.config.halt_lambda * self.ramp() * mean

    def cost(self, gpt, R):
        decisions = self.steps * flops.linear_weights(self.router)
        heads = self.steps * gpt.lm_head.weight.numel()                 # for p_k
        return replace(super().cost(gpt, R), decisions=decisions, training_only=heads)

    def can_take(self, steps):
        return True


HALTING = {'gate': Gate, 'mask': Mask, 'router': Router}


def new_mechanism(config):
    """The mechanism of a GPTConfig; with 0 steps there is nothing to halt."""
    if config.halting != 'none' and config.ponder_steps > 0:
        return HALTING[config.halting](config)
    return PONDER[config.ponder](config)
