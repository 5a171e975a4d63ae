"""
nanoPonder: a GPT, and the ideas that let it think more per token. All of them are in this file,
which needs PyTorch 2.11 or later and nothing else: copy it.

    B batch   T tokens   C n_embd   V vocab_size
    nh query heads   nkv key/value heads   hd head dimension   N keys in the cache
    S vectors that go through the blocks at once; T of them, until part 4 adds some to each token
    K ponder_steps   k number of a pass, or of a vector among those of its token, 0 .. K

The plain model is a Qwen3-style decoder: RMSNorm in front of each branch, rotary positions,
QK-norm, SwiGLU, no biases; query heads can share key/value heads. It is three functions, one after
the other. GPT.hidden is the first two; GPT.forward adds the third, or with targets the loss:

    x = gpt.embed(idx)          tokens (B,T)       -> embeddings (B,T,C)
    h = gpt.trunk(x, pos)       embeddings         -> hidden states (B,T,C); pos = torch.arange(T)
    logits = gpt.head(h)        hidden states      -> (B,T,V)

Depth-Attention works inside the trunk. Every other mechanism takes the place of the call of
gpt.trunk in GPT.hidden; docs/architecture.md has their drawings. Read from top to bottom: parts
1 and 2 are an ordinary GPT; skip what is marked with a later part.

    1  settings             GPTConfig
    2  the plain GPT        RMSNorm, rotary positions, Memory, Attention, MLP, Block, GPT
    3  Depth-Attention      values are mixed over layers
    4  pondering            several passes for each token: Embedding (PonderLM), Loop, Latent
                            (PonderLM-2), Feedback, Chain (latent chain of fixed length), Pause
    5  halting              each token takes as many of these as it needs: Gate (AdaPonderLM), Mask
                            (PonderLM-3), Router (adaptive latent chain), Exit and Ouro (of loops)
    6  checks               which settings make sense

To train with this file alone:

    gpt = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128))   # the defaults: 22M parameters
    optimizer = torch.optim.AdamW(gpt.parameters())
    for idx, targets in batches:                    # tokens (B,T), and their next ones (B,T)
        _, loss = gpt(idx, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens = gpt.eval().generate(prompt, 100)

A plain GPT needs no more. For the papers' schedules a loop sets two attributes before each step,
as train.py does: gpt.mechanism.progress (halting) and gpt.mechanism.drawn (Latent, Mask, Feedback);
they are in Mechanism.__init__.

train.py trains these classes. With its setting `fast`, which is on where there is CUDA and in
config/halting_*.py, engine/ has faster ones for some. If you edited one that is replaced, train.py
stops with an error: --fast=False runs what you wrote.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

# -------------------------------------------------------------------------------------------------
# 1  Settings


def require(ok, message):
    if not ok:
        raise ValueError(message)


@dataclass
class GPTConfig:
    """
    Shape and toggles of a model; the defaults are config/size/tiny.py, with GPT-2's vocabulary. A
    None stands for what its comment says. Most are filled in at once, and then stay:
    dataclasses.replace with another n_head would keep head_dim, so make a new config.
    """
    vocab_size: int = 50304              # rows of the embedding table; a multiple of 64 is faster
    n_tokens: Optional[int] = None       # those that are tokens (None: all); no other is predicted
    block_size: int = 256                # longest context, in tokens
    n_layer: int = 6                     # blocks
    n_head: int = 3                      # query heads
    n_kv_head: Optional[int] = None      # key/value heads (None: n_head)
    n_embd: int = 192                    # width of the residual stream
    head_dim: Optional[int] = None       # width of a head (None: n_embd / n_head)
    mlp_hidden: Optional[int] = None     # MLP's width (None: first multiple of 64 from 8/3 n_embd)
    rope_theta: float = 1e4              # base of the rotary frequencies
    norm_eps: float = 1e-5               # inside every RMSNorm
    qk_norm: bool = True                 # RMSNorm on each query and key head, before the rotation
    tie_embeddings: bool = False         # one table for the embedding and the output head
    embed_scale: Optional[float] = None  # factor on embeddings (None: 1, or the mechanism's)
    init_std: Optional[float] = None     # std of the initial matrices (None: sqrt(0.4 / n_embd))
    dropout: float = 0.0                 # probability: embeddings, attention weights, both branches

    # a plain GPT needs nothing below

    # Depth-Attention
    depth_attn: bool = False             # mix each layer's values with those of earlier layers
    depth_stride: Optional[int] = None   # s: with layers 0, s, 2s, .. (None: n_layer // 2, or 1)
    depth_mode: str = 'softmax'          # or 'uniform': a plain average, the paper's ablation

    # pondering
    ponder: str = 'none'                 # embedding, loop, latent, feedback, chain or pause
    ponder_steps: int = 3                # K: extra passes, or vectors, per token (0: one pass)
    ponder_topk: Optional[int] = None    # Embedding: mix only the k likeliest tokens (None: all)
    jacobi_iters: int = 3                # Latent: R, sweeps that refine its thoughts
    loop_norm: bool = False              # Loop: the final norm after every pass, not only the last

    # halting: gate works on embedding, mask on latent, router on chain, exit and ouro on loop
    halting: str = 'none'                # gate, mask, router, exit or ouro
    halt_tau: float = 1e-4               # a token stops once its score (part 5) is below this
    halt_lambda: Optional[float] = None  # weight of the halting losses (None: `defaults`, part 5)
    halt_start: Optional[float] = None   # share of the run at which that begins (None: `defaults`)
    halt_full: Optional[float] = None    # .. and from which its weight is full (None: `defaults`)
    halt_share: float = 0.1              # Gate: the share of all gates that its loss pushes down
    halt_beta: float = 10.0              # Router: beta, an exponent in its loss
    exit_loss: str = 'last'              # Exit: which passes must predict; or 'uniform', 'ramp'
    ouro_stage: int = 1                  # Ouro: 1 trains all, 2 the gate alone

    def __post_init__(self):
        check_values(self)          # each setting alone: part 6
        if self.n_tokens is None:
            self.n_tokens = self.vocab_size
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.head_dim is None:
            require(self.n_embd % self.n_head == 0,
                    f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}: "
                    "change one, or set head_dim")
            self.head_dim = self.n_embd // self.n_head
        if self.mlp_hidden is None:
            self.mlp_hidden = 64 * math.ceil(8 / 3 * self.n_embd / 64)
        if self.init_std is None:
            self.init_std = math.sqrt(0.4 / self.n_embd)    # PonderLM-2's: 0.02 at width 1,000
        if self.embed_scale is None:
            self.embed_scale = 1.0
            if self.ponder != 'none':           # sqrt(2.5 C) or sqrt(C): part 4
                self.embed_scale = PONDER[self.ponder].default_embed_scale(self.n_embd)
        if self.depth_stride is None and self.depth_attn:
            self.depth_stride = max(1, self.n_layer // 2)
        if self.halting != 'none':  # halt_lambda, halt_start and halt_full: part 5
            for name, value in HALTING[self.halting].defaults.items():
                if getattr(self, name) is None:
                    setattr(self, name, value)
        check_together(self)        # settings that clash: part 6


# -------------------------------------------------------------------------------------------------
# 2  The plain GPT


def at_least_fp32(x):
    """x in fp32, or in float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (arXiv 1910.07467)."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        weight = self.weight.to(x.dtype)  # x may be bf16: PyTorch's fused kernel wants one dtype
        y = F.rms_norm(x, weight.shape, weight, self.eps)
        return y.to(x.dtype)              # on CUDA, under autocast, rms_norm returns fp32


def rope_table(pos, head_dim, theta, dtype):
    """
    Rotary positions (arXiv 2104.09864): at position p, channels i and i + hd/2 are a pair that
    turns by the angle p theta^(-2i / hd). pos (S,), or in engine/ (B,S), -> cos and sin, each
    (.., S, 1, hd/2), of the dtype of what they turn, but at least fp32.
    """
    dtype = torch.promote_types(dtype, torch.float32)   # bf16 cannot tell position 257 from 256
    twice_i = torch.arange(0, head_dim, 2, device=pos.device, dtype=dtype)
    frequency = theta ** (-twice_i / head_dim)                          # (hd/2,)
    angle = pos.to(dtype)[..., None, None] * frequency                  # (.., S, 1 head, hd/2)
    return angle.cos(), angle.sin()


def apply_rope(x, cos, sin):
    """Turn x (B,S,heads,hd) by the angles of rope_table."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)                         # x may be bf16
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Memory:
    """
    The KV cache: of each layer the keys and values of all tokens so far. In training it is new and
    empty in each call, and dropped behind it: then a plain GPT needs no mask, and reads the keys
    and values of this call alone.

    In each call of the model: `begin` (in GPT.hidden), `mask` (GPT.trunk), `update` (every layer).
    """

    def __init__(self):
        self.tokens = 0             # read so far, those of this call included
        self.keys = {}              # of each layer: (B, nkv, N, hd)
        self.values = {}
        self.made = {}              # {layer: (k, v)} of this pass alone, for part 3, which mixed v
        self.loops = ()             # memories of earlier passes: part 4, Loop with part 3

    def begin(self, x):
        """Count tokens x (B,T), or embeddings (B,T,C), as read; returns their positions (T,)."""
        assert self.tokens == 0 or self.keys, "no gpt.trunk(x, pos, memory) had this memory so far"
        T = x.size(1)
        pos = torch.arange(self.tokens, self.tokens + T, device=x.device)
        self.tokens += T
        self.made = {}
        return pos

    def mask(self, S, device):
        """
        Which of N keys each of the newest S tokens attends to: (S,N), True for those up to itself.
        None stands for plain causal attention, which needs no mask and is faster. Some mechanisms
        have a rule in its place: part 4.
        """
        before = self.tokens - S            # `begin` has counted these S
        if before == 0:
            return None
        key_pos = torch.arange(self.tokens, device=device)              # (N,)
        query_pos = key_pos[before:, None]                              # (S,1)
        return key_pos <= query_pos                                     # (S,N)

    def update(self, layer, k, v):
        """Takes the keys and values (B, nkv, S, hd) of these tokens; returns all there are."""
        assert layer not in self.made, f"block {layer} ran twice in one pass"
        self.made[layer] = k, v
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), dim=2)
            v = torch.cat((self.values[layer], v), dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v


class Attention(nn.Module):
    """
    Causal attention; n_head / n_kv_head query heads share each key/value head (arXiv 2305.13245),
    and a norm on queries and keys (after 2010.04245, as in Qwen3) keeps scores small.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.config = config
        qkv_heads = config.n_head + 2 * config.n_kv_head                # q, k and v in one matmul
        self.c_attn = nn.Linear(config.n_embd, qkv_heads * config.head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x, rope, memory, mask):
        """
        x (B,S,C) -> (B,S,C)
        rope        (cos, sin) of the positions of x, from rope_table
        memory      keeps these keys and values beside those of before
        mask        which keys each position attends to (None: all up to its own), see Memory.mask
        """
        q, k, v = self.project(x, rope)
        if self.config.depth_attn:                                      # part 3
            sources = depth_sources(self.config, self.layer, memory)
            v = depth_attention(q, k, v, sources, self.config.depth_mode)
        keys, values = memory.update(self.layer, k, v)                  # (B, nkv, N, hd)
        dropout = self.config.dropout if self.training else 0.0
        y = self.attend(q, keys, values, mask, dropout)                 # (B, nh, S, hd)
        return self.c_proj(y.transpose(1, 2).flatten(2))                # heads side by side

    def project(self, x, rope):
        """x (B,S,C) -> q (B, nh, S, hd), k and v (B, nkv, S, hd); q and k normed and rotated."""
        B, S, _ = x.shape
        nh, nkv, hd = self.config.n_head, self.config.n_kv_head, self.config.head_dim
        qkv = self.c_attn(x).view(B, S, nh + 2 * nkv, hd)
        q, k, v = qkv.split((nh, nkv, nkv), dim=2)
        q = apply_rope(self.q_norm(q), *rope)
        k = apply_rope(self.k_norm(k), *rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    def attend(q, k, v, mask, dropout):
        """
        softmax(q k^T / sqrt(hd)) v over the keys of the mask: (B, nh, S, hd). Without a mask S = N.
        """
        shared_keys = q.size(1) > k.size(1)     # enable_gqa only then: not every kernel has it
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None,
                                              enable_gqa=shared_keys)


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
    """Attention, then the MLP, each behind a norm and added to x. The names are GPT-2's."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.ln_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rope, memory, mask):
        x = x + self.drop(self.attn(self.ln_1(x), rope, memory, mask))
        x = x + self.drop(self.mlp(self.ln_2(x)))
        return x


class GPT(nn.Module):
    """embed, trunk and head, as on top of this file, and the mechanism of parts 4 and 5."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        # GPT-2's name for the blocks; everywhere else h is hidden states
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.mechanism = new_mechanism(config)  # parts 4, 5; a plain GPT's has no weights
        self.init_weights()

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=self.config.init_std)
        self.mechanism.init_weights(self)       # part 4; Plain's changes nothing

    def forward(self, idx, targets=None):
        """
        Tokens (B,T) -> (logits (B,T,V), None). With targets (B,T), the next tokens: (None, loss),
        the mean cross-entropy in nats where they are not negative; in training mode the mechanism's
        loss in its place. (nanoGPT returns the logits too.)
        """
        h = self.hidden(idx)                                            # (B,T,C)
        if targets is None:
            return self.head(h), None
        if self.training and self.config.ponder != 'none':
            return None, self.mechanism.loss(self, h, targets)          # part 5 adds to self.loss
        return None, self.loss(h, targets)

    def hidden(self, idx, memory=None):
        """
        Tokens (B,T) -> the hidden states (B,T,C) that predict the next tokens: embed and trunk, or
        a mechanism in the place of the trunk.
        memory      from new_memory: idx goes on where it ends. None: idx is the whole text
        ValueError for more tokens than block_size.
        """
        if memory is None:
            memory = self.new_memory()
        length = memory.tokens + idx.size(1)
        limit = self.config.block_size
        require(length <= limit, f"{length} tokens are more than block_size={limit}")
        pos = memory.begin(idx)                                         # (T,)
        x = self.embed(idx)
        if self.config.ponder == 'none':
            return self.trunk(x, pos, memory)
        return self.mechanism(self, x, pos, memory)                     # parts 4 and 5

    def embed(self, idx):
        """Tokens (B,T) -> embeddings (B,T,C)."""
        return self.drop(self.wte(idx) * self.config.embed_scale)

    def trunk(self, x, pos, memory=None, norm=True):
        """
        All blocks and the final norm: x (B,S,C) at positions pos -> (B,S,C).
        pos         (S,), from memory.begin, or in engine/ (B,S)
        memory      the KV cache. None: x is the whole text, at positions 0, 1, ..
        norm        False leaves out the final norm: parts 4 and 5
        """
        if memory is None:
            memory = Memory()
            memory.begin(x)                                             # for its mask
        mask = memory.mask(x.size(1), x.device)                         # the same in all layers
        rope = rope_table(pos, self.config.head_dim, self.config.rope_theta, x.dtype)
        for block in self.h:
            x = block(x, rope, memory, mask)
        return self.ln_f(x) if norm else x

    def head(self, h):
        """Hidden states (..,C) -> logits (..,V), -inf for rows of the table that are not used."""
        logits = self.lm_head(h)
        if self.config.n_tokens < self.config.vocab_size:
            logits[..., self.config.n_tokens:] = -math.inf
        return logits

    def loss(self, h, targets):
        """The mean of token_losses over targets that are not negative."""
        return self.token_losses(h, targets).sum() / (targets >= 0).sum().clamp(min=1)

    def token_losses(self, h, targets):
        """Cross-entropy (B,T) of each next token in nats; 0 where the target is negative."""
        logits = at_least_fp32(self.head(h)).flatten(0, -2)             # (B T, V)
        target = targets.flatten().clamp(min=-1)                        # any negative one is -1
        losses = F.cross_entropy(logits, target, ignore_index=-1, reduction='none')
        return losses.view_as(targets)

    def new_memory(self, pad=None):
        """
        An empty memory. pad (B,): how much of each row, on its left, is padding; for prompts of
        unequal lengths in engine/generate.py.
        """
        if self.config.ponder == 'none':
            return Memory() if pad is None else Padded(pad)             # part 4
        return self.mechanism.new_memory(pad)                           # parts 4 and 5

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None):
        """
        Append tokens, one by one, to idx (B,T); the other arguments are those of `sample`. The
        model should be in eval mode. ValueError if it would have to read more than block_size
        tokens. sample.py uses engine/generate.py: longer texts, prompts of unequal lengths.
        """
        length = idx.size(1) + max_new_tokens - 1       # the last new token is not read
        limit = self.config.block_size
        require(length <= limit, f"{length} tokens are more than block_size={limit}")
        memory = self.new_memory()
        new = idx
        for _ in range(max_new_tokens):
            h = self.hidden(new, memory)[:, -1]                         # only what is new
            new = sample(self.head(h), temperature, top_k, top_p)[:, None]          # (B,1)
            idx = torch.cat((idx, new), dim=1)
        return idx

    def num_params(self):
        """Parameters, each counted once."""
        return sum(p.numel() for p in self.parameters())


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    Draw a token of each row: logits (B,V) -> (B,).
    temperature     0 takes the likeliest
    top_k           draws from the k likeliest, and those that equal the last of them
    top_p           draws from the fewest of these that together have at least this probability
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = at_least_fp32(logits)
    # the largest becomes 0, so that a tiny temperature makes neither inf nor NaN
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None:
        p, order = logits.softmax(-1).sort(descending=True)
        mass_before = p.cumsum(-1) - p          # the probability of all that are likelier
        beyond = mass_before >= top_p
        beyond[:, 0] = False                    # the likeliest of all stays
        beyond = torch.zeros_like(beyond).scatter(1, order, beyond)     # in the table's order again
        logits = logits.masked_fill(beyond, -math.inf)
    p = logits.softmax(-1)
    # torch.multinomial without its check for NaN, for which the host waits: with E drawn from
    # Exp(1), p / E is largest at token i with probability p_i.
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)


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
# S(l) is every layer below l that is a multiple of the stride s (depth_stride), so that layer 0 has
# no source. q and k are those of sequence attention, after norm and rotation: at one position both
# are turned alike, so the rotation cancels.
#
# Cost: 4 (|S(l)| + 1) nkv hd FLOPs per token and layer that has a source, 0.03 % of the 360M model;
# no parameter. The KV cache holds v~ in the place of v, so it does not grow.
# Unlike in the authors' code, keys are normed before they are rotated (the paper's order), not
# after, so that the weights a depend on no absolute position; and the cache holds v~, not v, so
# that decoding reads what training reads. Sources are counted from layer 0, as in their code; a
# sentence of the paper counts them back from layer l.


def source_layers(config, layer):
    """S(l): whose values are mixed into those of `layer`."""
    return range(0, layer, config.depth_stride)


def depth_sources(config, layer, memory):
    """
    [(k_j, v~_j), ..] of the layers j in S(l), from this pass. In a Loop (part 4) those of layer l
    itself from each earlier loop come first, so that there even layer 0 has sources.
    """
    loops = [earlier.made[layer] for earlier in memory.loops]
    return loops + [memory.made[j] for j in source_layers(config, layer)]


def depth_attention(q, k, v, sources, mode='softmax'):
    """
    The mixed values v~ (B, nkv, S, hd) of a layer with q (B, nh, S, hd) and k, v (B, nkv, S, hd).
    sources: from depth_sources. Queries that share a key head are averaged, as it has one value.
    """
    if not sources:
        return v
    values = [v_j for _, v_j in sources] + [v]
    if mode == 'uniform':
        return sum(values) / len(values)
    keys = [k_j for k_j, _ in sources] + [k]
    if q.size(1) != k.size(1):
        q = q.unflatten(1, (k.size(1), -1)).mean(2)                 # (B, nkv, S, hd)
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
#
# A slot is one vector that goes through the blocks in one pass: a token, or one of its thoughts.
# A mechanism takes the place of the one call of the trunk in GPT.hidden. Embedding and Loop call it
# K + 1 times, with a KV cache for each pass. The others, and all that halt, have one cache for all
# passes, and a rule says which slots attend to which.
#
# To add one: a subclass of Mechanism with `forward`, its name in PONDER, its settings in GPTConfig
# and in its `settings`.


class Mechanism(nn.Module):
    """
    What happens between embed(idx) and head(h). A paper's class says in `forward` how it uses
    gpt.trunk (in part 5: in the steps of Halting.forward). It has its own weights, its rule of who
    reads whom (whose queries attend to whose keys), its loss. gpt is an argument everywhere, as
    each would be a part of the other if it were kept.
    """
    rule = None     # a function such as flat, below: which slots a slot reads; None: those of its
                    # own pass. (In a class a staticmethod, or Python would pass it self.)

    # for programs; nothing here reads these five, nor `slots`, `passes` and `cost`: skip them
    halts = False                   # tokens stop by themselves: part 5
    trains_alone = False            # training changes the mechanism's own weights alone
    skips = False                   # Router: training may leave stopped tokens out
    iterates = False                # Latent, Feedback: several tokens at once are read by iteration
    settings = ('ponder_steps',)    # those of GPTConfig that it has, without those of halting

    def __init__(self, config):
        super().__init__()
        self.config = config
        # A training loop sets both before each step: progress = step / steps, and drawn, one of
        # draws(). As they stand here: halting at full strength, the most passes.
        self.progress = 1.0             # the share of the run that is done
        self.drawn = self.draws()[0]    # Latent, Mask: R; Feedback: extra passes; others: None
        self.passes = None              # (B,T), if tokens halt: what each took in the last call

    @property
    def K(self):
        return self.config.ponder_steps

    @property
    def slots(self):
        """Slots that a new token adds to the cache in generation, at most."""
        return self.K + 1

    @staticmethod
    def default_embed_scale(C):
        """
        The default of GPTConfig.embed_scale: with the default init_std, embeddings begin with RMS
        1, like hidden states.
        """
        return math.sqrt(2.5 * C)       # 1 / init_std, by default sqrt(0.4 / C)

    def init_weights(self, gpt):
        """
        Pondering models begin with small residual branches, as in PonderLM's and PonderLM-2's code;
        the mechanism's own biases begin at 0.
        """
        for block in gpt.h:
            block.attn.c_proj.weight.data /= math.sqrt(2 * self.config.n_layer)
            block.mlp.c_proj.weight.data /= math.sqrt(2 * self.config.n_layer)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def draws(self):
        """
        What `drawn` is drawn from, evenly, for each optimizer step; first what costs most. Most
        mechanisms have nothing to draw.
        """
        return [None]

    def new_memory(self, pad):
        """An empty memory, as GPT.new_memory: the one that `forward` gets."""
        if self.rule is not None:
            return SlotMemory(self.rule, pad)
        passes = range(self.K + 1)
        return Memories(Memory() if pad is None else Padded(pad) for _ in passes)

    def cost(self, gpt, drawn, training):
        """Its Cost, for engine/flops.py; PyTorch counts what a class without it costs."""
        raise NotImplementedError

    def forward(self, gpt, x, pos, memory):
        """
        Embeddings x (B,T,C) at positions pos (T,) -> the hidden states (B,T,C) that predict the
        next tokens. Without a rule, memory[k] is the Memory of pass k alone. With one, all passes
        share a SlotMemory, and memory.for_pass(k) is what gpt.trunk gets in pass k.
        """
        raise NotImplementedError

    def loss(self, gpt, h, targets):
        """What training minimises; h (B,T,C) is what `forward` returned."""
        return gpt.loss(h, targets)


@dataclass
class Cost:
    """What a mechanism costs for each token, for engine/flops.py: skip it."""
    vectors: int        # that go through the blocks
    keys: float         # whose scores these compute, in all, in units of T
    other: int = 0      # multiply-adds outside of the blocks; not those of the head that predicts
    no_grad: int = 0    # those of training alone that have no backward pass


def linear_weights(module):
    """How many weights a module's matrices have: the multiply-adds of one vector's products."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


class Padded(Memory):
    """
    A Memory of prompts of unequal lengths, with padding (B,) on the left of each row. Padding has
    positions too: rotary attention sees only differences.
    """

    def __init__(self, pad):
        super().__init__()
        self.pad = pad

    def mask(self, S, device):
        """As Memory.mask, (B,1,S,N). Padding attends to all there is: a softmax needs something."""
        pos = torch.arange(self.tokens, device=device)                  # (N,)
        is_token = pos >= self.pad[:, None]                             # (B,N)
        seen = super().mask(S, device)                                  # (S,N)
        if seen is None:
            seen = pos <= pos[-S:, None]
        from_padding = ~is_token[:, -S:, None]                          # (B,S,1)
        return (is_token[:, None] & seen | from_padding)[:, None]


class Memories(list):
    """A Memory for each pass: along the text, a pass attends to itself alone."""

    @property
    def tokens(self):
        return self[0].tokens

    def begin(self, x):
        """As Memory.begin, for all of them."""
        positions = [memory.begin(x) for memory in self]
        return positions[0]                                             # the same in all


class Plain(Mechanism):
    """What stands for a mechanism in a plain GPT, ponder='none'; `forward`, `loss` never run."""
    K = 0  # in the place of the property: whatever ponder_steps says
    settings = ()

    def init_weights(self, gpt):
        """A plain GPT keeps what GPT.init_weights drew."""

    def cost(self, gpt, drawn, training):
        return Cost(vectors=1, keys=1)


class Embedding(Mechanism):
    """
    PonderLM: Pretraining Language Models to Ponder in Continuous Space (arXiv 2505.20674)

    The mean embedding of the next token is added to the input, and the trunk runs again:

        P_j     = softmax(head(trunk(E_j)))     what the model would say after j steps      (B,T,V)
        E_{j+1} = E_j + P_j W,  E_0 = x         W: the table of embeddings, scaled          (B,T,C)
        logits  = head(trunk(E_K))              the loss reads the last pass only

    Cost: K + 1 passes, and K times 4 V C more FLOPs forward: the head, and a matmul to mix.
    Unlike in the authors' code, the softmax is fp32, padding in the vocabulary gets no mass, and
    the input is not multiplied by K (a flag of theirs that the paper does not have). All tokens are
    mixed, as in their code; the paper's text mixes only the 100 likeliest (ponder_topk).
    """
    settings = ('ponder_steps', 'ponder_topk')

    @staticmethod
    def default_embed_scale(C):
        return math.sqrt(C)     # as in their code (scale_embeds): embeddings begin with RMS 0.63

    def forward(self, gpt, x, pos, memory):
        for j in range(self.K):
            h = gpt.trunk(x, pos, memory[j])
            x = x + self.mixture(gpt, h)
        return gpt.trunk(x, pos, memory[self.K])

    @staticmethod
    def mixture(gpt, h):
        """P W: the mean embedding of the next token under head(h), (.., C) -> (.., C)."""
        config, table = gpt.config, gpt.wte.weight
        logits = gpt.head(h)                                                # (..,V)
        if config.ponder_topk is None:
            p = at_least_fp32(logits).softmax(-1).to(logits.dtype)
            mean = p @ table.to(p.dtype)
            return mean * config.embed_scale        # cheaper than to scale the table
        top = at_least_fp32(logits).flatten(0, -2).topk(config.ponder_topk, -1)   # n rows: (n,k)
        p = top.values.softmax(-1).to(table.dtype)                          # (n,k)
        mean = F.embedding_bag(top.indices, table, per_sample_weights=p, mode='sum')  # (n,C)
        return mean.view_as(h) * config.embed_scale

    def cost(self, gpt, drawn, training):
        head = gpt.lm_head.weight.numel()
        mixture = (self.config.ponder_topk or self.config.vocab_size) * self.config.n_embd
        return Cost(vectors=self.K + 1, keys=self.K + 1, other=self.K * (head + mixture))


class Loop(Mechanism):
    """
    The looped Transformer, a baseline of the papers: all blocks K + 1 times in a row, the final
    norm once, or with loop_norm after each. With depth_attn, what the same layer made in earlier
    loops is a source too, as in Depth-Attention's paper. Cost: K + 1 passes.
    """
    settings = ('ponder_steps', 'loop_norm')

    def forward(self, gpt, x, pos, memory):
        for k in range(self.K + 1):
            if self.config.depth_attn:
                memory[k].loops = memory[:k]                        # for depth_sources
            last = k == self.K
            x = gpt.trunk(x, pos, memory[k], norm=last or self.config.loop_norm)
        return x

    def cost(self, gpt, drawn, training):
        return Cost(vectors=self.K + 1, keys=self.K + 1)


# Where slots of several passes, or several of one token, attend to each other, it takes a rule. A
# slot has labels: t, the time of its token, and k, the number of its pass or its place among the
# slots of its token. A rule says by the labels of a query and of a key whether the one reads the
# other, that is, attends to it; it gets those of all queries as (B,S,1), those of all keys as
# (B,1,N), and so says it of all pairs, (B,S,N). The slots of two tokens with K = 1, as (t,k):
#
#     Chain, a pass after the other     (0,0) (1,0)   then   (0,1) (1,1)
#     Latent, all in one pass           (0,0) (0,1) (1,0) (1,1)


@dataclass
class Labels:
    """Labels of N slots in each of B rows, (B,N) each."""
    t: torch.Tensor         # the time of the token, or NEVER
    k: torch.Tensor         # the number of the pass, or of the slot among those of its token
    log_w: Optional[torch.Tensor] = None    # Mask, part 5: what is added to scores against a key

    def __getitem__(self, where):
        log_w = None if self.log_w is None else self.log_w[where]
        return Labels(self.t[where], self.k[where], log_w)

    def joined(self, new):
        """These labels, and in each row `new` ones behind them."""
        t = torch.cat((self.t, new.t), dim=1)
        k = torch.cat((self.k, new.k), dim=1)
        log_w = None if self.log_w is None else torch.cat((self.log_w, new.log_w), dim=1)
        return Labels(t, k, log_w)


def flat(query, key):
    """
    A rule: a slot reads all slots of earlier tokens, and of its own token those up to itself, as if
    all slots of all tokens stood in one row.
    """
    return (key.t < query.t) | ((key.t == query.t) & (key.k <= query.k))


def by_pass(query, key):
    """A rule: a slot reads those of its own and of earlier passes, of all tokens up to its own."""
    return (key.t <= query.t) & (key.k <= query.k)


# The time of padding, and of keys that nobody is to read: those a token makes after it stopped, and
# those of hidden thoughts. No token reads them, since no rule reads what is later than the query. A
# query of padding has this time too, so it reads something, as a softmax must.
NEVER = 2 ** 40


def token_times(pos, B, pad):
    """(B,T): the label t of tokens at pos (T,): pos itself, but NEVER for padding."""
    if pad is None:
        return pos.expand(B, -1)
    return torch.where(pos < pad[:, None], NEVER, pos)


def labels_of(t, first_k, n, visible, log_w):
    """
    (labels as queries, labels as keys) of tokens with times t (B,T), which have n slots each, side
    by side, numbered from first_k on. As keys, slots that are not `visible` (B, T n) have the time
    NEVER; None: all are visible. log_w (B, T n) or None: as in Labels.
    """
    slot_t = t.repeat_interleave(n, dim=1)                              # (B, T n)
    slot_k = torch.arange(first_k, first_k + n, device=t.device).repeat(t.size(1))
    query = Labels(slot_t, slot_k.expand_as(slot_t), log_w)
    if visible is None:
        return query, query
    return query, replace(query, t=slot_t.where(visible, NEVER))


class SlotMemory(Memory):
    """
    A Memory of slots. rule(query, key) says who reads whom, in booleans, or in numbers that are
    added to the scores. The order of calls:

        begin(x)        by GPT.hidden
        rewind()        where the next pass replaces what the one before left
        for_pass(k)     before each call of gpt.trunk, which gets what this returns
    """

    def __init__(self, rule, pad=None):
        super().__init__()
        self.rule = rule
        self.pad = pad              # as in Padded, or None
        self.t = None               # (B,T): times of the tokens of this call
        self.n_before = 0           # how many slots the tokens before these have
        self.key_labels = None      # of all slots so far, if there are some
        self.query_labels = None    # of those of this pass
        self.plain_causal = False   # whether the rule need not be asked in this pass
        self.state = None           # Feedback alone: what it carries on from here, (B,1,C)

    def begin(self, x):
        pos = super().begin(x)
        self.t = token_times(pos, len(x), self.pad)
        self.n_before = 0 if self.key_labels is None else self.key_labels.t.size(1)
        return pos

    def for_pass(self, first_k=0, n=1, visible=None, log_w=None):
        """
        A pass over these tokens begins; returns the memory for gpt.trunk: here this one, in engine/
        another. In it each token has n slots, side by side, numbered from first_k on.
        visible     (B, T n) bool: the other slots go through it too, but nobody reads them
        log_w       (B, T n), for Mask's rule
        """
        nothing_before = self.key_labels is None
        self.query_labels, new = labels_of(self.t, first_k, n, visible, log_w)
        self.key_labels = new if nothing_before else self.key_labels.joined(new)
        self.made = {}
        # With nothing before and nothing hidden, flat is plain causal attention, as slots lie in
        # its order; that is faster. So is by_pass, if each token has one slot in this pass.
        is_causal = self.rule is flat or (self.rule is by_pass and n == 1)
        self.plain_causal = nothing_before and is_causal and self.pad is None and visible is None
        return self

    def mask(self, S, device):
        """As Memory.mask, by the rule: (B,1,S,N)."""
        assert self.query_labels is not None, "memory.for_pass(k) comes before gpt.trunk"
        if self.plain_causal:
            return None
        # labels (B,S,1) and (B,1,N)
        return self.rule(self.query_labels[:, :, None], self.key_labels[:, None])[:, None]

    def rewind(self):
        """Forget the slots of these tokens: they were guesses."""
        n = self.n_before
        if n == 0:      # as new: a first pass needs no mask
            self.key_labels, self.keys, self.values = None, {}, {}
            return
        self.key_labels = self.key_labels[:, :n]
        self.keys = {layer: held[:, :, :n] for layer, held in self.keys.items()}
        self.values = {layer: held[:, :, :n] for layer, held in self.values.items()}

    def is_token(self):
        """(B,T) bool: False for padding."""
        return self.t < NEVER


def side_by_side(slots):
    """The n slots of each token, (B,T,C) each, in a row, x_0 z_{0,1} .. x_1 ..: (B, T n, C)."""
    return torch.stack(slots, dim=2).flatten(1, 2)


class Latent(Mechanism):
    """
    PonderLM-2: Pretraining LLM with Latent Thoughts in Continuous Space (arXiv 2509.23184)

    K thoughts follow each token, at its position; each is what the trunk made of the slot before:

        x_0 z_{0,1} .. z_{0,K}  x_1 z_{1,1} ..          z_{t,k} = trunk(..) at the slot before it

    What comes out of a token's last slot predicts the next token. Attention is causal over this
    row of slots, so a token's thoughts depend on all slots before them: the exact way is
    sequential. Training, and a text that is read at once, solve it by Jacobi iteration: guess all
    thoughts, run the trunk over all slots, take what comes out as the next guess. For K = 2 and
    R = jacobi_iters (in training also R - 1):

        sweep 0             x_t                 guesses z_1
        sweep 1             x_t  z_1            renews z_1, guesses z_2
        sweeps 2 .. R + 1   x_t  z_1  z_2       renew both
        sweep R + 2         x_t  z_1  z_2       gives the output, at the slot of z_2

    z_{t,k} is exact after t K + k sweeps.

    Cost (K > 0): K (K + 1) / 2 + (R + 1) (K + 1) slots per token, which read up to K + 1 times the
    keys; in decoding K + 1 passes of one slot. Unlike in the authors' code, R is drawn for each
    optimizer step, not for each forward; and a prompt can be read exactly (`exact` in
    engine/generate.py).
    """
    rule = staticmethod(flat)
    settings = ('ponder_steps', 'jacobi_iters')
    iterates = True

    def draws(self):
        """R or R - 1, as in the authors' code, so that thoughts do not fit one R alone."""
        R = self.config.jacobi_iters
        return [R, max(R - 1, 0)]

    @property
    def R(self):
        return self.drawn if self.training else self.config.jacobi_iters

    def forward(self, gpt, x, pos, memory):
        if x.size(1) == 1 and not self.training:    # a single token: slot after slot
            for k in range(self.K + 1):
                x = gpt.trunk(x, pos, memory.for_pass(k))
            return x

        h = ()                          # h[k], out of slot k, is the next guess of z_{k+1}
        for n in self.slots_of_sweeps(self.R):
            slots = [x, *h][:n]         # x_t, z_1, z_2, ..
            h = self.sweep(gpt, slots, pos, memory)
        return h[self.K]

    def sweep(self, gpt, slots, pos, memory, visible=None, log_w=None):
        """
        A pass over n slots of each token, (B,T,C) each -> what comes out of each. visible, log_w:
        as in SlotMemory.for_pass.
        """
        n = len(slots)
        memory.rewind()                                 # what the sweep before left was a guess
        pass_memory = memory.for_pass(n=n, visible=visible, log_w=log_w)
        h = gpt.trunk(side_by_side(slots), pos.repeat_interleave(n), pass_memory)
        return h.unflatten(1, (-1, n)).unbind(2)

    def slots_of_sweeps(self, R):
        """The slots of a token in each sweep: 1, 2, .. K, and then R + 1 times K + 1."""
        if self.K == 0:
            return [1]
        return [*range(1, self.K + 1), *[self.K + 1] * (R + 1)]

    def cost(self, gpt, drawn, training):
        slots = self.slots_of_sweeps(drawn)
        return Cost(vectors=sum(slots), keys=sum(n * n for n in slots))


class Feedback(Mechanism):
    """
    Latent feedback: what the trunk made of a token joins the input of the next one. Two sources:
    P2N, in the code of Depth-Attention's authors (not announced, no paper), and the Full-bandwidth
    Transformer (arXiv 2608.08888), which has a gate too; here there is none.

        h_t     = trunk(x_t + h_{t-1}), which attends to all tokens before it            h_{-1} = 0

    Thinking is carried along the text instead of being repeated in one place: a new token takes one
    pass and leaves one slot, as in the plain model. Computed exactly, this is sequential. Training,
    and a text that is read at once, solve it by iteration, as Latent does:

        h^(0)   = trunk(x)              (where a text goes on: with the h before it at its first x)
        h^(k)   = trunk(x + shift(h^(k-1)))         shift(h)_t = h_{t-1}                k = 1 .. K

    h^(k)_t is exact once k >= t. The loss reads the last pass; each optimizer step draws whether
    that is K or K - 1: with K alone, generation by the first equation fails.

    Cost: K + 1 passes to read a text, in training K + 1 or K (K > 1); in generation one.
    P2N scales x by 1 / sqrt(2) and h by 1 / sqrt(2 C); here both begin with RMS 1. It has no cached
    decoding; here that is the first equation.
    """
    rule = staticmethod(flat)       # one slot a token: causal. Only a memory with a rule can rewind
    slots = 1                       # in the place of the property
    iterates = True

    def draws(self):
        """K or K - 1, as P2N; but not K - 1 = 0, where nothing would be fed back."""
        return [self.K, self.K - 1] if self.K > 1 else [self.K]

    def forward(self, gpt, x, pos, memory):
        steps = self.drawn if self.training else self.K
        is_token = memory.is_token()[..., None]                         # (B,T,1)
        carried = memory.state                              # h of the token before these
        if carried is None:
            carried = torch.zeros_like(x[:, :1])                        # (B,1,C)
        shifted = torch.cat((carried, torch.zeros_like(x[:, 1:])), dim=1)   # h_{t-1} where known
        for _ in range(min(steps + 1, x.size(1))):          # T passes are always exact
            memory.rewind()                                 # what the pass before left was a guess
            h = gpt.trunk(x + shifted, pos, memory.for_pass())
            h = h.where(is_token, 0.0)                      # padding carries nothing on
            shifted = torch.cat((carried, h[:, :-1]), dim=1)
        memory.state = h[:, -1:] if steps > 0 else None     # K = 0: nothing is fed back
        return h

    def cost(self, gpt, drawn, training):
        return Cost(vectors=drawn + 1, keys=drawn + 1)


class Chain(Mechanism):
    """
    Pretraining with Token-Level Adaptive Latent Chain-of-Thought (arXiv 2602.08220), its arm of
    fixed length; Router is the adaptive one. The paper counts k from 1, we from 0.

        z_t^(0)   = trunk of the token's embedding, at slot (t, 0)
        z_t^(k+1) = trunk of z_t^(k), at slot (t, k+1)                            k = 0 .. K - 1
        slot (t, k) sees slot (t', k') if and only if t' <= t and k' <= k                (Eq. 2)

    Pass k never looks at later passes, so all tokens take it at once: exact, in parallel, without
    iteration, and the keys of earlier passes are computed once.

    Cost: K + 1 passes, whose attention reads 1, 2, .. K + 1 times as many keys.
    """
    rule = staticmethod(by_pass)    # (Eq. 2)

    def forward(self, gpt, x, pos, memory):
        for k in range(self.K + 1):
            x = gpt.trunk(x, pos, memory.for_pass(k))
        return x

    def cost(self, gpt, drawn, training):
        return Cost(vectors=self.K + 1, keys=(self.K + 1) * (self.K + 2) / 2)


class Pause(Mechanism):
    """
    Pause tokens, a baseline of the papers: K copies of one learned embedding follow each token, at
    its position, and the last of them predicts the next token. Cost: one pass of K + 1 slots per
    token, each of which reads K + 1 times as many keys.
    """
    rule = staticmethod(flat)

    def __init__(self, config):
        super().__init__(config)
        if config.ponder_steps > 0:     # else it would be a weight without a gradient
            self.pause = nn.Parameter(torch.randn(config.n_embd) * config.init_std)

    @staticmethod
    def default_embed_scale(C):
        return math.sqrt(C)     # as Embedding, in whose paper it is a baseline

    def forward(self, gpt, x, pos, memory):
        n = self.K + 1
        slots = [x]
        for _ in range(self.K):
            slots.append((self.pause * self.config.embed_scale).expand_as(x))
        h = gpt.trunk(side_by_side(slots), pos.repeat_interleave(n), memory.for_pass(n=n))
        return h[:, n - 1::n]                                           # (B,T,C)

    def cost(self, gpt, drawn, training):
        return Cost(vectors=self.K + 1, keys=(self.K + 1) ** 2)


PONDER = {'none': Plain, 'embedding': Embedding, 'latent': Latent, 'feedback': Feedback,
          'chain': Chain, 'loop': Loop, 'pause': Pause}


# -------------------------------------------------------------------------------------------------
# 5  Halting: five classes over four of these mechanisms; each token takes the passes it needs


@dataclass
class TokenState:
    """What tokens carry from pass to pass, (B,T,..) each."""
    x: torch.Tensor         # (B,T,C)  from this `before` makes the input of the next pass
    out: torch.Tensor       # (B,T,C)  the output so far: complete once the token stops
    go_on: torch.Tensor     # (B,T)    whether another pass comes: a stopped token never resumes
    score: torch.Tensor     # (B,T)    of the last pass: what is compared with halt_tau; at first 1

    def where(self, taken, other):
        """These fields where taken (B,T), else those of `other`: as torch.where."""
        merged = {}
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            chosen = taken if ours.dim() == 2 else taken[..., None]
            merged[field.name] = torch.where(chosen, ours, theirs)
        return type(self)(**merged)


class Halting(Mechanism):
    """
    A mechanism whose tokens stop by themselves. A subclass says how they begin, what goes into a
    pass and what is made of its output, and what training adds to the loss; the loop over the
    passes, `forward`, is here. (Mask has its own for a text that it reads at once.) Tokens that
    stopped go through the blocks all the same, and the keys that they make there are hidden: so
    stopping saves nothing until all have stopped. With `fast`, engine/ leaves stopped tokens out in
    generation, for Router in training too, and over a text it computes no scores with keys that the
    rule `newest` does not read; the lines "Cost:" below count that. In the docstrings tau is
    halt_tau.

    Each also inherits from the mechanism that it stops (settings, draws, helpers). Halting is named
    first: its methods come before theirs.
    """
    halts = True
    final_norm = True       # whether each pass ends with gpt.ln_f
    works_on = None         # the `ponder` whose tokens it stops
    defaults = {}           # of its settings in GPTConfig
    score_name = None       # what is compared with halt_tau, in words: tools/explain.py

    def __init__(self, config):
        super().__init__(config)
        # What `forward` leaves for `loss`: (taken, new) of each pass. taken (B,T): who took it.
        # new: the states after it, also of tokens that had stopped before. (Mask has one entry.)
        self.trace = []

    def forward(self, gpt, x, pos, memory):
        """Passes until every token has had enough; in training all K + 1."""
        state = self.start(x, go_on=memory.is_token())
        self.trace = []
        for k in range(self.K + 1):
            taken = state.go_on         # (B,T): who takes pass k; the others are not read in it
            pass_memory = memory.for_pass(k, visible=taken, log_w=self.log_w_of_pass(state, k))
            x = self.before(gpt, state, k)
            h = gpt.trunk(x, pos, pass_memory, norm=self.final_norm)
            new = self.after(gpt, state, x, h, k)       # of all tokens
            state = new.where(taken, state)             # who had stopped keeps its state
            self.trace.append((taken, new))
            if not self.training and not state.go_on.any():
                break
        self.passes = torch.stack([taken for taken, _ in self.trace]).sum(0)  # (B,T)
        return state.out.to(x.dtype)

    def start(self, x, go_on):
        """The state before pass 0, of embeddings x (B,T,C); go_on (B,T): who takes it."""
        one = at_least_fp32(x.new_ones(go_on.shape))
        return TokenState(x=x, out=torch.zeros_like(x), go_on=go_on, score=one)

    def before(self, gpt, state, k):
        """What goes into pass k, (B,T,C)."""
        return state.x

    def log_w_of_pass(self, state, k):
        """Mask: what its rule adds to the scores against the slots of pass k, (B,T)."""
        return None

    def after(self, gpt, state, x, h, k):
        """The state after pass k, which made h (B,T,C) of x (B,T,C)."""
        raise NotImplementedError

    def penalty(self, gpt, targets):
        """What `loss` adds, after `forward`; targets (B,T) as in GPT.forward."""
        raise NotImplementedError

    def loss(self, gpt, h, targets):
        return gpt.loss(h, targets) + self.penalty(gpt, targets)

    def decisions(self):
        """The scores (B,T) after the passes 0, 1, .. K - 1 of the last text, or fewer."""
        return [new.score for _, new in self.trace[:self.K]]

    def onset(self):
        """0 until halt_start, 1 from halt_full on: shares of the training run."""
        start, full = self.config.halt_start, self.config.halt_full
        if self.progress >= full:
            return 1.0
        if self.progress <= start:
            return 0.0
        return (self.progress - start) / (full - start)

    def __getstate__(self):
        return {**self.__dict__, 'trace': []}   # copy.deepcopy refuses tensors that have a graph


def mean_where(chosen, values):
    """The mean of those values (B,T) that are chosen."""
    return (values * chosen).sum() / chosen.sum().clamp(min=1)


def without_autocast(module, h):
    """module(h) in the precision of its weights, the result at least in fp32: halt_tau is small."""
    device = 'cpu' if h.is_meta else h.device.type      # engine/flops.py counts without numbers
    with torch.autocast(device, enabled=False):
        weight_dtype = next(module.parameters()).dtype
        return at_least_fp32(module(h.to(weight_dtype)))


def newest(query, key):
    """
    A rule: of each token up to its own, a query of pass k reads one slot: that of pass k, or of the
    token's last pass if it stopped before. Token 0 stopped after pass 0, so that (0,1) is hidden:
    of the keys (0,0) (1,0) (0,1) (1,1) query (1,1) reads the first and the last.
    """
    N = key.t.size(-1)
    # the token that made a key, by its time t: t < N, as each token so far has a key. N: hidden
    token = key.t.clamp(max=N)                          # (B,1,N); in the example 0 1 4 1
    # the last pass of each token (in floats: MPS has no amax of integers), then of each key's token
    last = torch.zeros(len(token), 1, N + 1, device=token.device)
    last = last.scatter_reduce(-1, token, key.k.float(), 'amax')
    last = last.gather(-1, token)                       # (B,1,N); in the example 0 1 1 1
    return (key.t <= query.t) & (key.k == torch.minimum(last, query.k))


class Gate(Halting, Embedding):
    """
    AdaPonderLM: Gated Pondering Language Models with Token-Wise Adaptive Depth (arXiv 2603.01914)

    PonderLM's passes i = 0 .. K (k in the code), with a gate after each that scales the next step,
    or ends the token's pondering:

        s^i     = sigmoid(MLP_i(h^i))            a gate after every pass but the last      (2), (3)
        m^{i+1} = m^i and s^i >= tau, m^0 = 1    who takes another pass                    (4), (5)
        E^{i+1} = E^i + m^{i+1} s^i P^i W        PonderLM's step, scaled by the gate     (6) to (9)
        a token with m^i = 0 keeps the keys and values of its last pass, in every layer        (10)

    The loss gains halt_lambda times the mean of the lowest gates (13): how many, as a share of all,
    grows from 0 at halt_start to halt_share at halt_full (14). Before halt_start nobody halts in
    training: otherwise cross-entropy alone would shut the gates for good.

    Cost: that of Embedding in training, and 8 C^2 FLOPs per gate; in generation the passes taken.
    No public code. Where the paper is silent: a stopped token's output is the hidden state of its
    last pass; (13) also averages gates that training computes of stopped tokens; GELU; gates start
    near sigmoid(4) = 0.98, so that training begins nearly as PonderLM's.
    """
    rule = staticmethod(newest)     # (10)
    works_on = 'embedding'
    defaults = dict(halt_lambda=0.1, halt_start=0.4, halt_full=0.48)
    score_name = 'gate'

    def __init__(self, config):
        super().__init__(config)
        C = config.n_embd
        self.gates = nn.ModuleList()
        for _ in range(config.ponder_steps):
            self.gates.append(nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, 1)))

    def init_weights(self, gpt):
        super().init_weights(gpt)
        for gate in self.gates:
            nn.init.constant_(gate[-1].bias, 4.0)

    def before(self, gpt, state, k):
        if k == 0:
            return state.x
        m, s = state.go_on, state.score                                 # after pass k - 1
        step = (m * s)[..., None] * self.mixture(gpt, state.out)
        return state.x + step.to(state.x.dtype)                         # (6) to (9)

    def after(self, gpt, state, x, h, k):
        m, s = state.go_on, state.score
        if k == self.K:                                                 # nothing comes after it
            return TokenState(x=x, out=h, go_on=torch.zeros_like(m), score=s)
        s = without_autocast(self.gates[k], h).squeeze(-1).sigmoid()    # (2), (3)
        if not self.training or self.progress >= self.config.halt_start:
            m = m & (s >= self.config.halt_tau)                         # (4), (5)
        return TokenState(x=x, out=h, go_on=m, score=s)

    def penalty(self, gpt, targets):
        """halt_lambda times the mean of the lowest gates."""
        is_target = targets >= 0                                        # (B,T)
        gates = torch.stack(self.decisions())                           # (K,B,T)
        gates = gates.masked_fill(~is_target, math.inf).flatten().sort().values
        share = self.onset() * self.config.halt_share                   # (14)
        n = (share * self.K * is_target.sum()).floor()  # a tensor: an int would wait for CUDA
        lowest = torch.arange(len(gates), device=gates.device) < n
        mean = gates.where(lowest, 0.0).sum() / n.clamp(min=1)          # (13)
        return self.config.halt_lambda * mean

    def cost(self, gpt, drawn, training):
        steps = super().cost(gpt, drawn, training)
        return replace(steps, other=steps.other + linear_weights(self))


def faded(query, key):
    """A rule: flat, and log_w is added to all scores against a key."""
    return torch.where(flat(query, key), key.log_w, -math.inf)


@dataclass
class MaskState(TokenState):
    s: torch.Tensor         # (B,T,K+1)  probability that it needs exactly k thoughts
    log_w: torch.Tensor     # (B,T,K+1)  log of the probability that it needs at least k


class Mask(Halting, Latent):
    """
    PonderLM-3: Adaptive Token-Wise Pondering with Differentiable Masking (arXiv 2603.02023)

    A router decides, after a token's own slot, how many of PonderLM-2's thoughts it needs. Each is
    read, and counts, as much as it is likely to be needed. (From Latent it has draws, R and the
    sweeps.)

        s_t     = softmax(router(h_t^(0)))       how many thoughts token t needs, K + 1 outcomes
        w_{t,k} = sum_{j >= k} s_{t,j}           probability that thought k is needed; w_{t,0} = 1
        scores of key (t, k), in every layer, += log w_{t,k}
        output  = sum_k s_{t,k} h_t^(k)          h_t^(k): hidden state at slot (t, k)

    A text is read by Latent's sweeps, each of which refreshes s. Outside of training, slots
    with w < tau are hidden from the next sweep and from the output; s is not scaled back to a sum
    of 1. Decoding takes slot after slot: Halting.forward, by `start` and `after` from here. With
    `fast` it leaves hidden ones out. The loss gains halt_lambda times the expected number of
    thoughts, in full from halt_full on; this term is ours.

    Cost: that of Latent in training; in decoding 1 + (the number of thoughts with w >= tau) slots.
    No public code, and the text of the paper was not available to us: the equations are those of
    its figure and of a reader's notes.
    """
    rule = staticmethod(faded)
    works_on = 'latent'
    defaults = dict(halt_lambda=0.01, halt_start=0.4, halt_full=0.48)
    score_name = 'probability of another thought'

    def __init__(self, config):
        super().__init__(config)
        self.router = nn.Linear(config.n_embd, config.ponder_steps + 1)

    def route(self, h):
        """Hidden states (B,T,C) of the tokens' own slots -> s and log w, each (B,T,K+1)."""
        log_s = without_autocast(self.router, h).log_softmax(-1)
        log_w = log_s.flip(-1).logcumsumexp(-1).flip(-1)                # sums over j >= k, in logs
        return log_s.exp(), F.pad(log_w[..., 1:], (1, 0))               # log w_0 is exactly 0

    def forward(self, gpt, x, pos, memory):
        if x.size(1) == 1 and not self.training:    # a single token: slot after slot, by `after`
            return Halting.forward(self, gpt, x, pos, memory)

        is_token = memory.is_token()
        state = self.start(x, is_token)
        log_w = state.log_w                                             # (B,T,K+1)
        needed = is_token[..., None].expand_as(log_w)
        h = ()
        # A sweep hides what the router of the sweep before did not ask for; but it computes hidden
        # slots all the same, as the next one may want them again.
        for n in self.slots_of_sweeps(self.R):
            visible = None if self.training else needed[..., :n].flatten(1)
            added = log_w[..., :n].flatten(1).to(x.dtype)
            h = self.sweep(gpt, [x, *h][:n], pos, memory, visible, added)
            s, log_w = self.route(h[0])
            needed = (log_w.exp() >= self.config.halt_tau) & is_token[..., None]

        self.passes = needed.sum(-1)        # (B,T): in training, those that it would take
        self.trace = [(is_token, replace(state, s=s, log_w=log_w))]     # for decisions, penalty
        weight = s if self.training else s * needed
        out = sum(weight[..., k, None] * h[k] for k in range(self.K + 1))
        return out.to(x.dtype)

    def start(self, x, go_on):
        zero = at_least_fp32(x.new_zeros(*x.shape[:2], self.K + 1))     # log_w = 0: w = 1
        out = torch.zeros_like(x, dtype=zero.dtype)
        one = torch.ones_like(zero[..., 0])
        return MaskState(x=x, out=out, go_on=go_on, score=one, s=zero, log_w=zero)

    def log_w_of_pass(self, state, k):
        return state.log_w[..., k].to(state.x.dtype)

    def after(self, gpt, state, x, h, k):
        s, log_w = state.s, state.log_w
        if k == 0:                                                      # the router is asked once
            s, log_w = self.route(h)
        out = state.out + s[..., k, None] * h
        score, go_on = state.score, torch.zeros_like(state.go_on)
        if k < self.K:
            score = log_w[..., k + 1].exp()
            go_on = state.go_on & (score >= self.config.halt_tau)
        return MaskState(x=h, out=out, go_on=go_on, score=score, s=s, log_w=log_w)

    def decisions(self):
        _, routed = self.trace[0]
        return list(routed.log_w.exp().unbind(-1)[1:])

    def penalty(self, gpt, targets):
        """halt_lambda and the onset times the mean of the thoughts expected, sum_k k s_{t,k}."""
        _, routed = self.trace[0]
        is_target = targets >= 0                                        # (B,T)
        expected = (routed.s * torch.arange(self.K + 1, device=targets.device)).sum(-1)
        return self.config.halt_lambda * self.onset() * mean_where(is_target, expected)

    def cost(self, gpt, drawn, training):
        sweeps = len(self.slots_of_sweeps(drawn))
        return replace(super().cost(gpt, drawn, training), other=sweeps * linear_weights(self))


@dataclass
class RouterState(TokenState):
    g: torch.Tensor         # (B,T)    probability of going on after its last pass


class Router(Halting, Chain):
    """
    Pretraining with Token-Level Adaptive Latent Chain-of-Thought (arXiv 2602.08220)

    A chain that each token leaves when its probability of getting further is small. The paper
    counts k from 1, we from 0:

        g_t^(k)   = sigmoid(router(z_t^(k)))        whether to go on; g_t^(K) is made, not used  (3)
        reach^(0) = 1,  reach^(k+1) = reach^(k) g^(k)                  probability of pass k + 1 (4)
        K*        = the last pass with reach >= tau                    later ones do not happen  (6)
        weight^(k) = reach^(k) (1 - g^(k)) before K*, reach^(k) at K*                     (5), (7)
        output    = sum_k weight^(k) z^(k)                                                       (8)
        loss     += halt_lambda mean_t sum_{k <= K*, k < K} g^(k) p_k^beta                 (9), (10)
                    p_k: the right token's probability after pass k, a constant for gradients

    halt_start > 0 delays the last term, not that tokens leave; the paper has both from the first
    optimizer step on.

    Cost: the passes of Chain that are taken; training takes all without `fast`, and a head for each
    p_k. No public code. Where the paper is silent: tau is 1e-4 as in AdaPonderLM, embeddings are
    scaled as in PonderLM-2, the router starts around 1/2, and we average over t.
    """
    rule = staticmethod(by_pass)
    works_on = 'chain'
    defaults = dict(halt_lambda=0.4, halt_start=0.0, halt_full=0.0)     # the whole run
    score_name = 'probability of getting further'
    skips = True

    def __init__(self, config):
        super().__init__(config)
        self.router = nn.Linear(config.n_embd, 1)

    def start(self, x, go_on):
        reach = at_least_fp32(x.new_ones(go_on.shape))
        out = torch.zeros_like(x, dtype=reach.dtype)
        return RouterState(x=x, out=out, go_on=go_on, score=reach, g=torch.zeros_like(reach))

    def after(self, gpt, state, x, h, k):
        reach = state.score
        g = without_autocast(self.router, h).squeeze(-1).sigmoid()      # (3)
        next_reach = reach * g                                          # (4)
        go_on = state.go_on & (k < self.K) & (next_reach >= self.config.halt_tau)       # (6)
        weight = torch.where(go_on, reach * (1 - g), reach)             # (5), (7)
        out = state.out + weight[..., None] * h                         # (8)
        return RouterState(x=h, out=out, go_on=go_on, score=next_reach, g=g)

    def penalty(self, gpt, targets):
        """halt_lambda and the onset times the mean over tokens of sum_k g^(k) p_k^beta."""
        total = 0.0
        for taken, new in self.trace[:self.K]:
            counted = targets.where(taken, -1)                          # (B,T): -1 for who left
            with torch.no_grad():
                p = gpt.token_losses(new.x, counted).neg().exp()        # new.x is z
            total = total + (new.g * p ** self.config.halt_beta * (counted >= 0)).sum()
        mean = total / (targets >= 0).sum().clamp(min=1)
        return self.config.halt_lambda * self.onset() * mean            # (9), (10)

    def cost(self, gpt, drawn, training):
        heads = self.K * gpt.lm_head.weight.numel()                     # of p_k
        asked = (self.K + 1) * linear_weights(self)
        return replace(super().cost(gpt, drawn, training), other=asked, no_grad=heads)


class Exit(Halting, Loop):
    """
    Exits from the looped Transformer by confidence (arXiv 2607.20519)

        h^k     = the final norm of what pass k makes; with loop_norm pass k + 1 starts from it
        doubt^k = 1 - the largest probability of head(h^k)              no weights
        L^k     = cross-entropy of head(h^k)
        loss    = sum_k prior_k L^k             which passes must predict: exit_loss, below

    A token leaves when its doubt is below halt_tau. Its newest keys and values are read after it
    left, as in Gate. exit_loss is one of

        last        prior_k = 1 for k = K, else 0
        uniform     prior_k = 1 / (K + 1)
        ramp        prior_k = (k + 1) / sum_j (j + 1)

    Three things are ours:

        late        uniform and ramp begin late: before halt_start the prior is that of 'last', from
                    halt_full on theirs
        leaving     from halt_full on tokens leave in training too, and L^k is that of the last pass
                    a token took: later tokens learn to read the keys of those that left
        staying     tokens with negative targets (those of a question: they are given, and nothing
                    is to be predicted there) learn to stay, since all that follows reads them: a
                    loss pulls their predictions towards equal probabilities, with a weight that
                    grows from 0 at halt_start to halt_lambda at halt_full

    Cost: K + 1 passes, in generation those that are taken. After each a head; in training only for
    uniform and ramp, from halt_start on (counted for the whole run). Not counted: the heads that
    training takes to leave and to stay.
    The authors' code takes all passes and then picks one. Here generation with `fast` skips tokens
    that left. Unlike in Loop, earlier loops are no sources of Depth-Attention.
    """
    rule = staticmethod(newest)
    works_on = 'loop'
    defaults = dict(halt_lambda=0.1, halt_start=0.5, halt_full=0.7)
    score_name = 'doubt'

    def __init__(self, config):
        super().__init__(config)
        self.final_norm = config.loop_norm

    def after(self, gpt, state, x, h, k):
        out = h if self.final_norm else gpt.ln_f(h)
        go_on, score = state.go_on & (k < self.K), state.score
        if k < self.K and self.may_leave():
            with torch.no_grad():   # detach: for PyTorch's FLOP counter around FastGPT
                score = self.score_after(gpt, state, out.detach())
            go_on = go_on & (score >= self.config.halt_tau)
        return TokenState(x=h, out=out, go_on=go_on, score=score)

    def may_leave(self):
        return not self.training or self.progress >= self.config.halt_full

    def score_after(self, gpt, state, out):
        """doubt^k (B,T) after a pass that made `out` (B,T,C) of `state`."""
        return 1 - self.confidence(gpt, out)

    @staticmethod
    def confidence(gpt, h):
        """The largest probability of head(h): (.., C) -> (..)."""
        return at_least_fp32(gpt.head(h)).softmax(-1).amax(-1)

    def outputs(self):
        """h^k of each pass, (B,T,C); of a token that left before, that of its last pass."""
        outs = []
        for taken, new in self.trace:
            previous = outs[-1] if outs else new.out
            outs.append(torch.where(taken[..., None], new.out, previous))
        return outs

    def prior(self, n):
        """The weights of the losses of n passes: at first 'last', from halt_full on exit_loss."""
        last = [0] * (n - 1) + [1]
        chosen = {'last': last, 'uniform': [1] * n, 'ramp': range(1, n + 1)}[self.config.exit_loss]
        onset = self.onset()
        total = sum(chosen)
        return [(1 - onset) * old + onset * new / total for old, new in zip(last, chosen)]

    def loss(self, gpt, h, targets):
        outs = self.outputs()                                           # the last of them is h
        prior = self.prior(len(outs))
        losses = sum(p * gpt.loss(out, targets) for p, out in zip(prior, outs) if p > 0)
        return losses + self.penalty(gpt, targets)

    def penalty(self, gpt, targets):
        """A loss that makes tokens with negative targets stay, times halt_lambda and the onset."""
        given = targets < 0                                             # (B,T)
        weight = self.config.halt_lambda * self.onset()
        if weight == 0 or not given.any():
            return 0.0
        total = 0.0
        for taken, new in self.trace[:self.K]:
            nats = self.uniform_nats(gpt, new.out)
            total = total + mean_where(given & taken, nats)
        return weight * total / self.K

    @staticmethod
    def uniform_nats(gpt, h):
        """Cross-entropy of head(h) with equal probabilities as its target: (.., C) -> (..)."""
        logits = at_least_fp32(gpt.head(h))[..., :gpt.config.n_tokens]
        return logits.logsumexp(-1) - logits.mean(-1)

    def cost(self, gpt, drawn, training):
        heads = self.K * gpt.lm_head.weight.numel()
        if training and self.config.exit_loss == 'last':
            heads = 0
        return replace(super().cost(gpt, drawn, training), other=heads)


class Ouro(Exit):
    """
    Exits from the looped Transformer by a learned gate: Ouro, Scaling Latent Reasoning via Looped
    Language Models (arXiv 2510.25741). The paper counts passes from 1; it has loop_norm=True, as
    config/halting_ouro.py has. exit_loss has no effect here.

        lam_k = sigmoid(w h^k + b)              one gate for all passes
        S_k   = prod_{j <= k} (1 - lam_j)       probability of another pass after k
        p_k   = lam_k S_{k-1},  p_K = S_{K-1}   probability of leaving after k; S_{-1} = 1       (3)

    A token leaves when S_k is below halt_tau; in the paper when p_0 + .. + p_k = 1 - S_k reaches q.
    It is trained in two stages, ouro_stage, in which nobody leaves:

        1   all weights     sum_k p_k L^k - halt_lambda H(p)                                     (4)
        2   the gate alone  cross-entropy of 1 - lam_k with sigmoid(50 (I_k - 0.005)), where
                            I_k = max(0, L^k - L^{k+1}) is what the next pass gains         (5), (6)

    Ours, as in Exit: tokens with negative targets are pulled to lam = 0 (not to leave), in stage 1
    with a weight that grows from 0 at halt_start to halt_lambda at halt_full. In (6) the paper
    compares lam_k with the gain of pass k itself; but what lam_k rules is the next one.

    Cost: K + 1 passes, in generation those that are taken; in training a head after each.
    """
    score_name = 'survival'

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Linear(config.n_embd, 1)
        self.trains_alone = config.ouro_stage == 2

    def lam(self, h):
        return without_autocast(self.gate, h).squeeze(-1).sigmoid()

    def may_leave(self):
        return not self.training

    def score_after(self, gpt, state, out):
        """S_k (B,T)."""
        return state.score * (1 - self.lam(out))

    def loss(self, gpt, h, targets):
        outs = self.outputs()                                           # h^k, (B,T,C) each
        if self.config.ouro_stage == 2:
            return self.gate_loss(gpt, [out.detach() for out in outs], targets)
        lams = [self.lam(out) for out in outs[:self.K]]
        p = self.leaving(lams)
        nats = sum(p_k * gpt.token_losses(out, targets) for out, p_k in zip(outs, p))   # (B,T)
        tiny = torch.finfo(lams[0].dtype).tiny      # at p = 0 the gradient of p log p would be NaN
        entropy = -sum(p_k * p_k.clamp(min=tiny).log() for p_k in p)    # (B,T)
        loss = mean_where(targets >= 0, nats - self.config.halt_lambda * entropy)       # (4)
        return loss + self.stay(lams, targets)          # in the place of Exit.penalty

    def leaving(self, lams):
        """p_k, (B,T) each."""
        p, survival = [], torch.ones_like(lams[0])
        for lam in lams:
            p.append(lam * survival)
            survival = survival * (1 - lam)
        return [*p, survival]                                           # (3)

    def stay(self, lams, targets):
        """A loss that pulls lam to 0, not to leave, where targets are negative."""
        nats = sum(-(1 - lam).clamp(min=1e-6).log() for lam in lams)    # (B,T)
        return self.config.halt_lambda * self.onset() * mean_where(targets < 0, nats) / self.K

    def gate_loss(self, gpt, outs, targets):
        """What the gate alone learns: whether the next pass gains."""
        with torch.no_grad():
            nats = [gpt.token_losses(out, targets) for out in outs]     # L^k, (B,T) each
        total = 0.0
        for k in range(self.K):
            gain = (nats[k] - nats[k + 1]).clamp(min=0)                 # (5)
            goes_on = torch.sigmoid(50 * (gain - 0.005))
            goes_on = goes_on.masked_fill(targets < 0, 1.0)             # a question's token stays
            lam = self.lam(outs[k]).clamp(1e-6, 1 - 1e-6)
            surprise = -goes_on * (1 - lam).log() - (1 - goes_on) * lam.log()
            total = total + surprise.mean()                             # (6)
        return total / (self.K + 1)     # K terms over K + 1 passes, as in the paper

    def cost(self, gpt, drawn, training):
        heads = self.K * gpt.lm_head.weight.numel() if training else 0
        gates = self.K * linear_weights(self)
        return replace(super().cost(gpt, drawn, training), other=heads + gates)


HALTING = {'gate': Gate, 'mask': Mask, 'router': Router, 'exit': Exit, 'ouro': Ouro}


def new_mechanism(config):
    """The mechanism of a GPTConfig; with K = 0 there is nothing to halt."""
    if config.halting != 'none' and config.ponder_steps > 0:
        return HALTING[config.halting](config)
    return PONDER[config.ponder](config)


# -------------------------------------------------------------------------------------------------
# 6  Checks: which settings make sense


def check_values(c):
    """ValueError for a number out of its range, or a choice that there is not, of a GPTConfig."""
    positive = ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'head_dim',
                'mlp_hidden', 'n_tokens', 'depth_stride', 'ponder_topk', 'rope_theta', 'norm_eps',
                'embed_scale', 'init_std')
    for name in positive:
        value = getattr(c, name)
        require(value is None or value > 0, f"{name}={value} must be positive")
    for name in ('ponder_steps', 'jacobi_iters', 'halt_lambda', 'halt_beta'):
        value = getattr(c, name)
        require(value is None or value >= 0, f"{name}={value} must not be negative")
    require(c.dropout < 1, f"dropout={c.dropout} must be below 1")
    for name in ('dropout', 'halt_tau', 'halt_start', 'halt_full', 'halt_share'):
        value = getattr(c, name)
        require(value is None or 0 <= value <= 1, f"{name}={value} must be between 0 and 1")
    choices_of = {
        'ponder': PONDER,                       # among them 'none'
        'halting': ('none', *HALTING),
        'depth_mode': ('softmax', 'uniform'),
        'exit_loss': ('last', 'uniform', 'ramp'),
        'ouro_stage': (1, 2),
    }
    for name, choices in choices_of.items():
        value = getattr(c, name)
        one_of = ', '.join(map(repr, choices))
        require(value in choices, f"{name}={value!r} must be one of {one_of}")


def check_together(c):
    """ValueError for settings that clash, of a GPTConfig whose defaults are filled in."""
    require(c.n_tokens <= c.vocab_size,
            f"n_tokens={c.n_tokens} is larger than vocab_size={c.vocab_size}: raise vocab_size")
    require(c.head_dim % 2 == 0, f"head_dim={c.head_dim} is odd, but rotary positions turn pairs: "
                                 "change n_head or head_dim")
    require(c.n_head % c.n_kv_head == 0,
            f"n_head={c.n_head} is not a multiple of n_kv_head={c.n_kv_head}: change one of them")
    require(c.ponder_topk is None or c.ponder_topk <= c.n_tokens,
            f"ponder_topk={c.ponder_topk} is more than n_tokens={c.n_tokens}: lower it")
    if c.halting != 'none':
        needs = HALTING[c.halting].works_on
        require(c.ponder == needs, f"halting={c.halting!r} does not work with "
                                   f"ponder={c.ponder!r}: set ponder={needs!r}")
        require(c.halt_start <= c.halt_full,
                f"halt_start={c.halt_start} is above halt_full={c.halt_full}: lower it")
