"""
nanoPonder: a GPT, and the ideas that let it think more per token. All of them are in this file,
which needs PyTorch 2.11 or later and nothing else: copy it.

    B batch   T tokens   C n_embd   V vocab_size
    nh query heads   nkv key/value heads   hd head dimension   N keys of a memory
    S slots: the vectors that go through the blocks at once, one for each token until part 4
    K ponder_steps: extra passes, or extra slots, for each token
    k number of a pass or slot, 0 .. K, as in h_k, or h_{t,k} of token t; in `q, k, v` the keys

The plain model is a Qwen3-style decoder: RMSNorm in front of each branch, rotary positions,
QK-norm, SwiGLU, no biases; query heads can share key/value heads. It is three functions, one after
the other. GPT.hidden is the first two; GPT.forward adds the third, or with targets the loss:

    x = gpt.embed(idx)          tokens (B,T)       -> embeddings (B,T,C)
    h = gpt.trunk(x)            embeddings         -> hidden states (B,T,C)
    logits = gpt.head(h)        hidden states      -> (B,T,V)

Depth-Attention works inside the trunk. Every other method is a mechanism, a class of its own:
GPT.hidden calls the mechanism, and the mechanism calls gpt.trunk (in a plain GPT once, and that is
all). docs/architecture.md has drawings. Read from top to bottom: parts 1 and 2 are an ordinary GPT;
skip what is marked with a later part.

    1  settings             GPTConfig
    2  the plain GPT        RMSNorm, rotary positions, Memory, Attention, MLP, Block, GPT
    3  Depth-Attention      values are mixed over layers
    4  pondering            other ways through the blocks, most of which do more work for each
                            token: Smear, Loop, Embedding (PonderLM), Chain (latent chain of fixed
                            length), Pause, Latent (PonderLM-2), Feedback
    5  halting              each token takes as many passes as it needs: Gate (AdaPonderLM), Mask
                            (PonderLM-3), Router (adaptive latent chain), Exit and Ouro (of loops)
    6  checks               which settings make sense

To train with this file alone, where `batches` are those of the whole run:

    gpt = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128))
    optimizer = torch.optim.AdamW(gpt.parameters())
    for step, (idx, targets) in enumerate(batches):     # tokens (B,T), and their next ones (B,T)
        gpt.mechanism.begin_step(step, len(batches))    # parts 4, 5: schedules, random choices
        _, loss = gpt(idx, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens = gpt.eval().generate(prompt, 100)

train.py, sample.py and the tools run these classes, on every device. But they generate with
engine/generate.py, three pieces have a quicker form (docs/architecture.md), and released models
whose blocks differ get those of engine/variant.py.
"""

import math
import random
from dataclasses import dataclass
from functools import partial, wraps
from types import SimpleNamespace
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# -------------------------------------------------------------------------------------------------
# 1  Settings


def require(ok, message):
    if not ok:
        raise ValueError(message)


@dataclass
class GPTConfig:
    """
    Shape and toggles of a model; the defaults are config/size/tiny.py. None stands for the default
    that the comment names; __post_init__ puts in the number, if the model needs it. To change one,
    make a new GPTConfig: dataclasses.replace would keep what was filled in, such as the head_dim of
    the old n_embd.
    """
    vocab_size: int = 50304              # rows of the embedding table; a multiple of 64 is faster
    n_tokens: Optional[int] = None       # rows that are tokens (None: all); others get logits -inf
    block_size: int = 256                # longest context, in tokens
    n_layer: int = 6                     # blocks
    n_head: int = 3                      # query heads
    n_kv_head: Optional[int] = None      # key/value heads (None: n_head)
    n_embd: int = 192                    # width of the residual stream
    head_dim: Optional[int] = None       # width of a head (None: n_embd / n_head)
    mlp_hidden: Optional[int] = None     # MLP's width (None: 8/3 n_embd, up to a multiple of 64)
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
    depth_stride: Optional[int] = None   # sources: layers 0, stride, .. (None: n_layer // 2, or 1)
    depth_mode: str = 'softmax'          # or 'uniform': a plain average, the paper's ablation

    # pondering
    ponder: str = 'none'                 # smear, loop, embedding, chain, pause, latent, feedback
    ponder_steps: int = 3                # K: extra passes, or slots, for each token; not for smear
    loop_norm: bool = False              # Loop, Exit, Ouro: the final norm after every pass
    ponder_topk: Optional[int] = None    # Embedding, Gate: likeliest tokens to mix (None: all)
    jacobi_iters: int = 3                # Latent, Mask: R, sweeps that refine the thoughts

    # halting: gate works on embedding, mask on latent, router on chain, exit and ouro on loop. None
    # takes the number in `defaults` of the rule's class. (Exit's halt_lambda, and Ouro's halt_start
    # and halt_full, are for tokens with a negative target alone, such as those of a question.)
    halting: str = 'none'                # gate, mask, router, exit or ouro
    halt_tau: Optional[float] = None     # a token stops below it, see part 5 (None: the rule's)
    halt_lambda: Optional[float] = None  # weight of the halting loss (None: the rule's)
    halt_start: Optional[float] = None   # share of the run where `onset` begins (None: the rule's)
    halt_full: Optional[float] = None    # share of the run from which it is 1 (None: the rule's)
    halt_share: float = 0.1              # Gate: the share of gates that its loss pushes down
    halt_beta: float = 10.0              # Router: beta, an exponent in its loss
    exit_loss: str = 'ramp'              # Exit: which passes must predict; or 'uniform', 'last'
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
            self.embed_scale = PONDER[self.ponder].default_embed_scale(self.n_embd)     # part 4
        if self.depth_stride is None and self.depth_attn:
            self.depth_stride = max(1, self.n_layer // 2)
        if self.halting != 'none':
            for name, value in HALTING[self.halting].defaults.items():
                if getattr(self, name) is None:
                    setattr(self, name, value)
        check_together(self)        # settings that clash: part 6


# -------------------------------------------------------------------------------------------------
# 2  The plain GPT
#
# GPT.mechanism belongs to parts 4 and 5. Here it does four things: it makes a Memory, calls
# GPT.trunk, calls GPT.loss, and leaves the initial weights as they are.


def at_least_fp32(x):
    """x in fp32, or in float64 if it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mean_where(chosen, values):
    """The mean of those values (B,T) that are chosen (B,T); 0 if none is."""
    return (values * chosen).sum() / chosen.sum().clamp(min=1)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis (arXiv 1910.07467)."""

    def forward(self, x):
        weight = self.weight.to(x.dtype)  # x may be bf16: PyTorch's fused kernel wants one dtype
        y = F.rms_norm(x, weight.shape, weight, self.eps)
        return y.to(x.dtype)              # on CUDA, under autocast, rms_norm returns fp32


def rope_table(pos, head_dim, theta, dtype):
    """
    Rotary positions (arXiv 2104.09864): at position p, channels i and i + hd/2 are a pair that
    turns by the angle p theta^(-2i / hd). pos (S,) -> cos and sin (S, 1 head, hd/2), in fp32, or in
    float64 if dtype is that.
    """
    dtype = torch.promote_types(dtype, torch.float32)   # bf16 cannot tell position 257 from 256
    twice_i = torch.arange(0, head_dim, 2, device=pos.device, dtype=dtype)
    frequency = theta ** (-twice_i / head_dim)                          # (hd/2,)
    # (S, 1 head, hd/2); in engine/skip.py pos is (B,S), and this (B, S, 1, hd/2)
    angle = pos.to(dtype)[..., None, None] * frequency
    return angle.cos(), angle.sin()


def apply_rope(x, cos, sin):
    """Turn x (B,S,heads,hd) by the angles of rope_table."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)                         # x may be bf16
    a, b = x.chunk(2, dim=-1)                                           # (B,S,heads,hd/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def joined(old, new):
    """Keys or values of older tokens, then of newer ones, (B, nkv, .., hd); old may be None."""
    return new if old is None else torch.cat((old, new), dim=2)


class Memory:
    """
    The KV cache: of each layer the keys and values of all tokens so far. In training it is new in
    each call of the model, and holds the keys and values of this call alone. Each call of the model
    calls `begin` once. Then every layer calls `update`, once in each pass through the blocks (there
    is one pass until part 4).
    """
    keys_per_slot = 1       # keys that `update` returns for each slot; part 4: ChainMemory
    depth_memories = ()     # of earlier passes, which part 3 reads too; part 4: LoopMemory

    def __init__(self):
        self.tokens = 0             # how many it has read, the newest T included
        self.pos = None             # (S,): positions of the slots of the next pass
        self.keys = {}              # of each layer: (B, nkv, N, hd)
        self.values = {}
        self.N = 0                  # keys that each layer has after the next pass: one for each
                                    # token, in a SlotMemory (part 4) one for each slot

    def begin(self, x):
        """Before the blocks read tokens x (B,T), or their embeddings (B,T,C)."""
        first = self.tokens
        self.tokens += x.size(1)
        self.pos = torch.arange(first, self.tokens, device=x.device)
        self.N = self.tokens

    def update(self, layer, k, v):
        """Keeps k and v (B, nkv, S, hd) of the newest slots; returns all, (B, nkv, N, hd)."""
        k = self.keys[layer] = joined(self.keys.get(layer), k)
        v = self.values[layer] = joined(self.values.get(layer), v)
        assert k.size(2) == self.N, (f"{k.size(2)} keys, not {self.N}: a memory goes through "
                                     "gpt.trunk once after each begin (a SlotMemory: begin_pass)")
        return k, v

    def newest(self, layer, S):
        """The newest S keys and values of a layer, (B, nkv, S, hd) each, for parts 3 and 5."""
        return self.keys[layer][:, :, -S:], self.values[layer][:, :, -S:]


class Attention(nn.Module):
    """
    Causal attention; n_head / n_kv_head query heads share each key/value head (arXiv 2305.13245),
    and a norm on queries and keys (after 2010.04245, as in Qwen3) keeps scores small.
    """

    kernel = staticmethod(F.scaled_dot_product_attention)   # engine/cpu.py has one for CPUs

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.config = config
        qkv_heads = config.n_head + 2 * config.n_kv_head                # q, k and v in one matmul
        self.c_attn = nn.Linear(config.n_embd, qkv_heads * config.head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=False)
        hd, eps = config.head_dim, config.norm_eps
        self.q_norm = RMSNorm(hd, eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(hd, eps) if config.qk_norm else nn.Identity()

    def forward(self, x, rope, memory):
        """
        x (B,S,C) -> (B,S,C)
        rope        (cos, sin) of the positions of x, from rope_table
        memory      keeps the keys and values of x, and returns them behind those of earlier tokens
        """
        q, k, v = self.project(x, rope)
        if self.config.depth_attn:                                      # part 3
            sources = depth_sources(self.config, self.layer, memory, x.size(1))
            v = depth_attention(q, k, v, sources, self.config.depth_mode)
        # (B, nkv, n_keys, hd): n_keys is N, but in part 4 a ChainMemory has several keys for each
        # slot, and a WeightedMemory 8 more channels
        keys, values = memory.update(self.layer, k, v)
        y = self.attend(q, keys, values, memory.keys_per_slot)          # (B, nh, S, hd)
        return self.c_proj(y.transpose(1, 2).flatten(2))                # heads side by side

    def project(self, x, rope):
        """x (B,S,C) -> q (B, nh, S, hd), k and v (B, nkv, S, hd); q and k normed and rotated."""
        nh, nkv, hd = self.config.n_head, self.config.n_kv_head, self.config.head_dim
        qkv = self.c_attn(x).unflatten(-1, (nh + 2 * nkv, hd))          # (B, S, heads, hd)
        q, k, v = qkv.split((nh, nkv, nkv), dim=2)
        q = apply_rope(self.q_norm(q), *rope)
        k = apply_rope(self.k_norm(k), *rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q, k, v, per_slot=1):
        """
        softmax(q k^T / sqrt(hd)) v: q (B, nh, S, hd), k and v (B, nkv, n_keys, hd) ->
        (B, nh, S, hd). The queries are those of the newest S slots, and each reads the keys up to
        those of its slot. A slot has per_slot keys: one, but in Chain and Router several.
        """
        S, n_keys, hd = q.size(2), k.size(2), q.size(3)
        if k.size(3) > hd:      # part 4, WeightedMemory: a key's log w lies in 8 more channels
            q = F.pad(q, (0, k.size(3) - hd), value=1.0)
        dropout = self.config.dropout if self.training else 0.0
        kernel = partial(self.kernel, dropout_p=dropout, scale=hd ** -0.5)
        if S == 1 or S == n_keys:               # no mask tensor: the fastest kernels
            shared_keys = q.size(1) > k.size(1)     # enable_gqa only then: not all kernels have it
            y = kernel(q, k, v, is_causal=S > 1, enable_gqa=shared_keys)
        else:       # new tokens behind a cache, or Chain: is_causal would stop query 0 at key 0
            y = attend_in_turns(kernel, q, k, v, per_slot)
        return y[..., :hd]                      # without the 8 channels, if there are any


QUERIES_AT_ONCE = 256


def attend_in_turns(kernel, q, k, v, per_slot):
    """
    Attention.attend for several queries, where there are more keys than queries: never in the
    training of a plain GPT. QUERIES_AT_ONCE queries at a time get the keys that the last of them
    reads, so that masks stay small and little is computed in vain.
    """
    S, n_keys = q.size(2), k.size(2)
    if q.size(1) > k.size(1):           # shared keys: few fused kernels have these and a mask
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    parts = []
    for first in range(0, S, QUERIES_AT_ONCE):
        end = min(first + QUERIES_AT_ONCE, S)
        queries = torch.arange(first, end, device=q.device)[:, None]    # (m,1), m = end - first
        reads = n_keys - per_slot * (S - 1 - queries)           # (m,1): how many keys each reads
        n = n_keys - per_slot * (S - end)                       # how many the last of them reads
        mask = torch.arange(n, device=q.device) < reads                 # (m,n)
        parts.append(kernel(q[:, :, first:end], k[:, :, :n], v[:, :, :n], attn_mask=mask))
    return torch.cat(parts, dim=2)                                      # (B, nh, S, ..)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): c_proj(silu(gate) * up), gate and up from c_fc."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.mlp_hidden, bias=False)  # gate and up
        self.c_proj = nn.Linear(config.mlp_hidden, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.c_fc(x).chunk(2, dim=-1)                        # (B,S,mlp_hidden) each
        return self.c_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, then the MLP: each reads x normed, and is added to x. The names are GPT-2's."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config, layer)
        self.ln_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, rope, memory):
        x = x + self.drop(self.attn(self.ln_1(x), rope, memory))
        x = x + self.drop(self.mlp(self.ln_2(x)))
        return x


LOGITS_AT_ONCE = 2 ** 25    # 134 MB in fp32


def some_rows_at_once(function):
    """
    A decorator that saves memory: skip it at first. function(gpt, h, *targets) makes V logits of
    each row of h (..,C), and its result for a row depends on that row alone. With V = 50,304 the
    logits of 8 x 2048 tokens would take 3.3 GB. So where there are more than LOGITS_AT_ONCE, the
    function is called for n rows at a time, as (n,C), and backward computes their logits again.
    """
    @wraps(function)
    def in_parts(gpt, h, *targets):
        n = max(1, LOGITS_AT_ONCE // gpt.config.vocab_size)
        if h.shape[:-1].numel() <= n:
            return function(gpt, h, *targets)
        flat = [h.flatten(0, -2)] + [target.flatten() for target in targets]
        parts = zip(*[x.split(n) for x in flat])                    # (h, *targets) of n rows each
        done = [checkpoint(function, gpt, *part, use_reentrant=False) for part in parts]
        return torch.cat(done).unflatten(0, h.shape[:-1])
    return in_parts


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
        self.mechanism = new_mechanism(config)  # parts 4 and 5; a plain GPT's is Plain
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=config.init_std)
        self.mechanism.init_weights(self)       # part 4: smaller c_proj; a plain GPT's: nothing

    def forward(self, idx, targets=None):
        """
        Tokens (B,T) -> (logits, loss), one of which is None. targets (B,T) are the next tokens,
        negative where none is to be predicted, as in a question (part 5: Exit and Ouro teach such
        tokens to take every pass).

            without targets             (logits (B,T,V), None)
            with targets, in eval mode  (None, the mean cross-entropy in nats)
            with targets, in training   (None, the loss of the mechanism)
        """
        h = self.hidden(idx)                                            # (B,T,C)
        if targets is None:
            return self.head(h), None
        if self.training:
            return None, self.mechanism.loss(self, h, targets)      # of a plain GPT: self.loss
        return None, self.loss(h, targets)

    def hidden(self, idx, memory=None):
        """
        Tokens (B,T) -> the hidden states (B,T,C) that predict the next tokens: embed, then the
        mechanism, which calls the trunk.
        memory      from new_memory; idx follows what it has read. None: idx is the whole text
        ValueError for more tokens than block_size.
        """
        if memory is None:
            memory = self.new_memory()
        length = memory.tokens + idx.size(1)
        limit = self.config.block_size
        require(length <= limit, f"{length} tokens are more than block_size={limit}")
        memory.begin(idx)
        x = self.embed(idx)
        return self.mechanism(self, x, memory)          # of a plain GPT: self.trunk(x, memory)

    def embed(self, idx):
        """Tokens (B,T) -> embeddings (B,T,C)."""
        return self.drop(self.wte(idx) * self.config.embed_scale)

    def trunk(self, x, memory=None, norm=True):
        """
        All blocks and the final norm: x (B,S,C) -> (B,S,C).
        memory      the KV cache, and where x stands in the text. None: x is the whole text
        norm        False leaves out the final norm: parts 4 and 5
        """
        if memory is None:
            memory = Memory()
            memory.begin(x)
        rope = rope_table(memory.pos, self.config.head_dim, self.config.rope_theta, x.dtype)
        for block in self.h:
            x = block(x, rope, memory)
        return self.ln_f(x) if norm else x

    def head(self, h):
        """Hidden states (..,C) -> logits (..,V), -inf for rows of the table that are not used."""
        logits = self.lm_head(h)
        if self.config.n_tokens < self.config.vocab_size:
            logits[..., self.config.n_tokens:] = -math.inf
        return logits

    def loss(self, h, targets):
        """The mean of token_losses over targets that are not negative."""
        return mean_where(targets >= 0, self.token_losses(h, targets))

    @some_rows_at_once
    def token_losses(self, h, targets):
        """Cross-entropy of next tokens in nats, (..) of h (..,C); 0 where a target is negative."""
        logits = at_least_fp32(self.head(h)).flatten(0, -2)             # (B T, V)
        target = targets.flatten().clamp(min=-1)                        # any negative one is -1
        losses = F.cross_entropy(logits, target, ignore_index=-1, reduction='none')
        return losses.view_as(targets)

    def new_memory(self, pad=None):
        """An empty memory. pad (B,): how many tokens on the left of each row are padding."""
        return self.mechanism.new_memory(pad)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None):
        """
        Append tokens, one by one, to idx (B,T); the other arguments are those of `sample`.
        ValueError in training mode, and once it would have to read more than block_size tokens;
        sample.py's `stream` (engine/generate.py) has no such limit.
        """
        require(not self.training, "to generate, call gpt.eval() first")
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
    top_p           draws from the fewest, among what top_k leaves, that together have at least this
                    probability
    generator       of random numbers (None: PyTorch's)
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = at_least_fp32(logits)
    # the largest becomes 0; without the bounds a temperature of inf or 1e-45 could make NaN
    logits = (logits - logits.amax(-1, keepdim=True)) / min(max(temperature, 1e-30), 1e30)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None and top_p < 1:     # in fp32 the sum of all is not always exactly 1
        sorted_p, order = logits.softmax(-1).sort(descending=True)
        mass_before = sorted_p.cumsum(-1) - sorted_p    # the probability of all that are likelier
        beyond = mass_before >= max(top_p, 1e-30)       # the likeliest of all has 0: it stays
        beyond = beyond.scatter(1, order, beyond)       # in the table's order again
        logits = logits.masked_fill(beyond, -math.inf)
    p = logits.softmax(-1)
    # torch.multinomial looks for NaN, so the CPU would wait for the GPU. The same draw without it:
    # if each token i draws its own e_i from Exp(1), p_i / e_i is the largest with probability p_i.
    # (From NaN it draws token 0; engine/generate.py looks for that.)
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)


# -------------------------------------------------------------------------------------------------
# 3  Depth-Attention: Cross-Layer Value Mixing for Language Models (arXiv 2606.05014)
#
# Before layer l attends over the sequence, it attends over depth, at one position: its query scores
# its own key and the keys of a few earlier layers j, and the softmax of the scores mixes the values
# of these layers into its own value. Attention over the sequence then reads the mixed values. The
# sources of layer l, J(l), are the layers below it that are multiples of depth_stride; layer 0 has
# none. (The paper calls them S(l); here S counts slots.)
#
#     a_{l,j} = softmax_j( q_l . k_j / sqrt(hd) )              j in J(l), and l itself      (Eq. 2)
#     v~_l    = a_{l,l} v_l + sum_{j in J(l)} a_{l,j} v~_j     earlier ones mixed already   (Eq. 3)
#     o_l     = causal attention of (q_l, k_l, v~_l)           keys stay as they are        (Eq. 4)
#
# q and k are the same as in sequence attention, after norm and rotation: at one position both are
# turned alike, so the rotation cancels.
#
# Cost: 4 (|J(l)| + 1) nkv hd FLOPs per token and layer that has a source: 0.03 % of a forward pass
# of config/size/360m.py. (Pass k of a Loop has k sources more.) No parameter. The KV cache holds v~
# in the place of v: it does not grow.
#
# Three choices. Keys are normed before they are rotated, as in Qwen3, whose style the paper names
# (the authors' code: after it), so that the weights a depend on no absolute position. The cache
# holds v~, as in the paper (their code: v), so that decoding reads what training reads. Sources are
# counted from layer 0, as in their code; a sentence of the paper's first version counts them back
# from layer l.


def source_layers(config, layer):
    """J(l): the layers whose values are mixed into the values of `layer`."""
    return range(0, layer, config.depth_stride)


def depth_sources(config, layer, memory, S):
    """
    [(k_j, v~_j), ..] of the layers j in J(l), for the newest S slots. In a Loop (part 4) what
    layer l itself made in earlier passes comes first, so that there even layer 0 has sources.
    """
    in_earlier_passes = [of_pass.newest(layer, S) for of_pass in memory.depth_memories]
    return in_earlier_passes + [memory.newest(j, S) for j in source_layers(config, layer)]


def depth_attention(q, k, v, sources, mode='softmax'):
    """
    The mixed values v~ (B, nkv, S, hd) of a layer with q (B, nh, S, hd) and k, v (B, nkv, S, hd).
    sources: from depth_sources. Where query heads share a key head, their mean scores it.
    """
    if not sources:
        return v
    keys, values = zip(*sources, (k, v))
    if mode == 'uniform':
        return sum(values) / len(values)
    if q.size(1) != k.size(1):
        q = q.unflatten(1, (k.size(1), -1)).mean(2)                 # (B, nkv, S, hd)
    dtype = torch.promote_types(q.dtype, torch.float32)
    dots = [(q * k_j).sum(-1, keepdim=True, dtype=dtype) for k_j in keys]   # (B, nkv, S, 1) each
    scores = torch.cat(dots, dim=-1) * k.size(-1) ** -0.5           # (B, nkv, S, sources + 1)
    a = scores.softmax(-1).to(v.dtype).split(1, dim=-1)             # (Eq. 2)
    mixed = a[0] * values[0]
    for a_j, v_j in zip(a[1:], values[1:]):  # (Eq. 3); torch.stack would keep copies of all
        mixed = torch.addcmul(mixed, a_j, v_j)
    return mixed                                                    # (B, nkv, S, hd)


# -------------------------------------------------------------------------------------------------
# 4  Pondering: other ways through the blocks, most of which do more work for each token
#
# A slot is one of the vectors that go through the blocks at once. In a pass there is one for each
# token, and perhaps one for each of its thoughts: vectors that the model makes to think further. A
# mechanism calls the trunk as often as its paper says. Attention is causal in every pass. What else
# a slot may read is said by the memory that the pass gets:
#
#     Smear                       one WeightedMemory
#     Embedding                   a WeightedMemory for each pass: a pass reads its own keys
#     Loop                        a LoopMemory for each pass: its own keys; but with depth_attn
#                                 each layer mixes in its values of earlier passes
#     Chain                       a ChainMemory for each pass: a pass reads the keys of earlier ones
#     Pause, Latent, Feedback     one SlotMemory: all slots of all tokens in a row
#
# So the KV cache of Smear and Feedback is as large as a plain one, and that of the others K + 1
# times as large. Keys can have weights: those of padding weigh 0, and part 5 uses weights for more.
# Before each pass SlotMemory wants begin_pass(n) called, and part 5's memories begin_pass(takes).
#
# k counts passes and slots from 0. E_k, a loop's x_k and Latent's z_{t,k} go into pass or slot k;
# h_k, or of token t h_{t,k}, comes out of it. (In some papers k is a superscript.) Elsewhere x_t is
# the embedding of token t.
#
# To add a mechanism: a subclass of Mechanism with `forward`; with `new_memory`, too, if it calls
# the trunk more than once (as Embedding), or asks its memory for is_token or carried (as Smear, the
# simplest); its name in PONDER; its settings in GPTConfig.


class Mechanism(nn.Module):
    """
    What happens between embed(idx) and head(h). A paper's class says in `forward` how it uses
    gpt.trunk; it has its own weights, its memory, its loss. Methods that need the gpt get it: kept
    in an attribute it would be a submodule of its own mechanism, and gpt.train() would call itself
    for ever.
    """
    passes = None       # (B,T), if tokens halt: how many passes, or slots, each took last time

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.progress = None    # both are set by begin_step
        self.drawn = None       # Latent: R of this step; Feedback: its last pass

    def new_memory(self, pad):
        """An empty memory, as GPT.new_memory: the one that `forward` gets."""
        return Memory() if pad is None else WeightedMemory(pad)

    def forward(self, gpt, x, memory):
        """
        Embeddings x (B,T,C) -> the hidden states (B,T,C) that predict the next tokens. memory: what
        new_memory made, one Memory or several; GPT.hidden has called its `begin`.
        """
        raise NotImplementedError

    def loss(self, gpt, h, targets):
        """What training minimises; h (B,T,C) is what `forward` returned."""
        return gpt.loss(h, targets)

    def draws(self):
        """
        Skip it, and this_draw, until Latent. The values that begin_step chooses from, equally
        likely: Latent's R, Feedback's last pass; [None] if there is nothing to choose. The first is
        the one used outside of training. It must be the costliest: engine/plan.py counts on that.
        """
        return [None]

    @staticmethod
    def default_embed_scale(C):
        """The default embed_scale: with the default init_std, embeddings begin with RMS 1."""
        return math.sqrt(2.5 * C)       # 1 / the default init_std

    @property
    def K(self):
        return self.config.ponder_steps

    def init_weights(self, gpt):
        """
        Each c_proj is divided by sqrt(2 n_layer), as in GPT-2 and in PonderLM's and PonderLM-2's
        Llama code; the mechanism's own biases begin at 0. Plain, with depth_attn or without, does
        not divide, nor scale its embeddings. So compare a mechanism with ponder='loop' and
        ponder_steps=0, but Embedding, Gate and Pause with ponder='embedding' and ponder_steps=0.
        """
        for block in gpt.h:
            block.attn.c_proj.weight.data /= math.sqrt(2 * self.config.n_layer)
            block.mlp.c_proj.weight.data /= math.sqrt(2 * self.config.n_layer)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def begin_step(self, step, steps, seed=0):
        """
        To be called before each of a training run's optimizer steps, number 0, 1, .. steps - 1. It
        says what share of the run is done, which the schedules of halting ask for; and it draws, by
        (seed, step), so that all ranks and a resumed run draw the same.
        """
        self.progress = step / steps
        self.drawn = random.Random(f'{seed} {step}').choice(self.draws())

    def this_draw(self):
        """In training what begin_step drew from `draws`, else the first of them."""
        return self.from_begin_step(self.drawn) if self.training else self.draws()[0]

    @staticmethod
    def from_begin_step(value):
        """value, an attribute that begin_step sets; ValueError while it is None."""
        require(value is not None, "in training mode: call gpt.mechanism.begin_step(step, steps) "
                                   "before each optimizer step (to generate: gpt.eval())")
        return value


class Plain(Mechanism):
    """What a plain GPT has: one pass, and the weights that GPT.__init__ drew."""
    K = 0       # whatever ponder_steps says

    def forward(self, gpt, x, memory):
        return gpt.trunk(x, memory)

    @staticmethod
    def default_embed_scale(C):
        return 1.0

    def init_weights(self, gpt):
        pass


LOG_ZERO = -1e3     # stands for log 0: a softmax makes 0 of it, also in fp16. (-inf would make NaN
                    # of what comes out of padding, where all keys weigh 0.)
WEIGHT_CHANNELS = 8     # fast kernels want multiples of 8


def log_weight(is_read, log_w=None):
    """log_w, the logs of keys' weights (None: all weigh 1); LOG_ZERO where not is_read."""
    return torch.where(is_read, 0.0 if log_w is None else log_w, LOG_ZERO)


class WeightedMemory(Memory):
    """
    The Memory of parts 4 and 5, which knows more:

        is_token    (B,T): False for padding on the left
        earlier     the memories of the passes before, if each pass has one
        carried     (B,1,C): what Smear and Feedback hand to the next token
        log_w       (B,S): the log of the weights w of keys. It is added to all attention scores
                    against a key, so that the softmax counts the key w times. Padding has weight 0,
                    so no token reads it. (What comes out of padding is not used.) In part 4 nothing
                    else has a weight: skip `weighted` at first.

    The weights lie with the keys, in 8 more channels, and not in a mask, so the fastest kernels of
    attention serve. In these channels a query has 1 (Attention.attend), and a key
    c = log w sqrt(hd) / 8. So its scores get 8 c / sqrt(hd) = log w. (In bf16 log w is as coarse as
    the keys are.)
    """

    def __init__(self, pad=None, earlier=()):
        """pad (B,): how many tokens on the left of each row are padding."""
        super().__init__()
        self.pad = pad
        self.earlier = earlier
        self.is_token = None
        self.log_w = None           # of the next keys; None if no key here has a weight
        self.carried = None

    def begin(self, x):
        super().begin(x)
        # padding has positions, too: rotary scores depend on differences of positions alone
        pad = 0 if self.pad is None else self.pad[:, None]
        self.is_token = (self.pos >= pad).expand(len(x), -1)
        self.log_w = None if self.pad is None else log_weight(self.is_token)

    def update(self, layer, k, v):
        if self.log_w is not None:
            k, v = self.weighted(k, v)
        return super().update(layer, k, v)

    def weighted(self, k, v):
        """k and v (B, nkv, S, hd) with 8 more channels each, which hold c in k, 0 in v."""
        n = WEIGHT_CHANNELS
        c = self.log_w * k.size(-1) ** 0.5 / n                          # (B,S)
        channels = c.to(k.dtype)[:, None, :, None].expand(*k.shape[:3], n)      # (B, nkv, S, 8)
        return torch.cat((k, channels), dim=-1), F.pad(v, (0, n))

    def newest(self, layer, S):
        """As in Memory, without the 8 channels: parts 3 and 5 want the keys and values alone."""
        k, v = super().newest(layer, S)
        if self.log_w is None:
            return k, v
        return k[..., :-WEIGHT_CHANNELS], v[..., :-WEIGHT_CHANNELS]


class Memories(list):
    """
    A memory for each of the passes, each of which knows those of the passes before. GPT.hidden
    treats the list as a Memory; a mechanism gives memory[k] to the trunk in pass k.
    """

    def __init__(self, kind, n, pad):
        super().__init__()
        for k in range(n):
            self.append(kind(pad, earlier=self[:k]))

    @property
    def tokens(self):
        return self[0].tokens

    @property
    def is_token(self):
        return self[0].is_token

    def begin(self, x):
        for memory in self:
            memory.begin(x)


def shift(x, first):
    """x (B,T,C) one token later, behind `first` (B,1,C). None: zeros, where a text begins."""
    if first is None:
        first = torch.zeros_like(x[:, :1])
    return torch.cat((first, x[:, :-1]), dim=1)


class Smear(Mechanism):
    """
    Smear, as in modded-nanogpt and nanochat: the embedding of the token before joins the input.
    (There a gate, or a weight, says how much; here all of it joins.)

        h_t     = trunk(x_t + x_{t-1})                                                   x_{-1} = 0

    One vector is carried on to the next token. Cost: one pass, as the plain GPT.
    """
    K = 0       # whatever ponder_steps says

    def new_memory(self, pad):
        return WeightedMemory(pad)      # which has is_token and carried, also without padding

    def forward(self, gpt, x, memory):
        x = x.where(memory.is_token[..., None], 0.0)        # padding is not handed on
        before = shift(x, memory.carried)                               # x_{t-1}
        memory.carried = x[:, -1:]
        return gpt.trunk(x + before, memory)


class LoopMemory(WeightedMemory):
    """It shows depth_sources (part 3) the memories of earlier passes."""

    @property
    def depth_memories(self):
        return self.earlier


class Loop(Mechanism):
    """
    The looped Transformer (Universal Transformers, arXiv 1807.03819), a baseline of the papers: all
    blocks K + 1 times in a row.

        x_0     = x
        x_{k+1} = blocks(x_k)                   with loop_norm: norm(blocks(x_k))       k = 0 .. K
        h       = norm(x_{K+1})                 with loop_norm: x_{K+1}

    With depth_attn, what the same layer made in earlier passes is a source too, as in
    Depth-Attention's paper. Cost: K + 1 passes.
    """

    def new_memory(self, pad):
        return Memories(LoopMemory, self.K + 1, pad)

    def forward(self, gpt, x, memory):
        for k in range(self.K + 1):
            x = gpt.trunk(x, memory[k], norm=k == self.K or self.config.loop_norm)
        return x


class Embedding(Mechanism):
    """
    PonderLM: Pretraining Language Models to Ponder in Continuous Space (arXiv 2505.20674)

    The mean embedding of the next token is added to the input, and the trunk runs again, as in the
    paper's (3) to (7):

        P_k     = softmax(head(trunk(E_k)))     what the model would say after pass k       (B,T,V)
        E_{k+1} = E_k + P_k W,  E_0 = x         W: the table of embeddings, scaled          (B,T,C)
        logits  = head(trunk(E_K))              the loss reads the last pass only

    Cost: K + 1 passes, and K times 4 V C more FLOPs forward: the head, and a matmul to mix.
    Unlike in the authors' code, the softmax is fp32, rows that are no tokens get no probability,
    and the input is not multiplied by K (a flag of theirs that the paper does not have). All tokens
    are mixed, as in their code; the paper's text mixes only the 100 likeliest (ponder_topk).
    """

    @staticmethod
    def default_embed_scale(C):
        return math.sqrt(C)     # as in their code (scale_embeds): embeddings begin with RMS 0.63

    def new_memory(self, pad):
        return Memories(WeightedMemory, self.K + 1, pad)

    def forward(self, gpt, x, memory):
        for k in range(self.K):
            h = gpt.trunk(x, memory[k])
            x = x + self.mixture(gpt, h)                                # E_{k+1}
        return gpt.trunk(x, memory[self.K])

    @staticmethod
    @some_rows_at_once
    def mixture(gpt, h):
        """P W: the mean embedding of the next token under head(h), (.., C) -> (.., C)."""
        config, table = gpt.config, gpt.wte.weight
        logits = gpt.head(h)                                                # (..,V)
        if config.ponder_topk is None:
            p = at_least_fp32(logits).softmax(-1).to(logits.dtype)
            mean = p @ table.to(p.dtype)
        else:       # embedding_bag wants two axes: (n, ponder_topk), of the n rows of h
            top = at_least_fp32(logits).flatten(0, -2).topk(config.ponder_topk, -1)
            p = top.values.softmax(-1).to(table.dtype)
            mean = F.embedding_bag(top.indices, table, per_sample_weights=p, mode='sum').view_as(h)
        return mean * config.embed_scale            # cheaper than to scale the table


class ChainMemory(WeightedMemory):
    """
    The memory of pass k: it keeps the keys of this pass, and returns those of passes 0 .. k, in the
    order of tokens. As (token, pass): (0,0) .. (0,k)  (1,0) .. (1,k) ..
    """

    def __init__(self, pad=None, earlier=()):
        super().__init__(pad, earlier)
        self.keys_per_slot = len(self.earlier) + 1

    def update(self, layer, k, v):
        super().update(layer, k, v)
        memories = [*self.earlier, self]
        # (B, nkv, N, passes, hd) -> (B, nkv, N passes, hd)
        keys = torch.stack([memory.keys[layer] for memory in memories], dim=3).flatten(2, 3)
        values = torch.stack([memory.values[layer] for memory in memories], dim=3).flatten(2, 3)
        return keys, values


class Chain(Mechanism):
    """
    Pretraining with Token-Level Adaptive Latent Chain-of-Thought (arXiv 2602.08220), its arm of
    fixed length; Router is the adaptive one. The paper counts k from 1: our h_{t,k} is its
    z_t^(k+1), and our K + 1 passes are its K_max.

        h_{t,0}   = trunk of the embedding x_t
        h_{t,k+1} = trunk of h_{t,k}                                              k = 0 .. K - 1
        token t in pass k reads token t' in pass k' if and only if t' <= t and k' <= k     (Eq. 2)

    Pass k never looks at later passes, so all tokens take it at once: exact, in parallel, without
    iteration, and the keys of earlier passes are computed once.

    Cost: K + 1 passes, whose attention reads 1, 2, .. K + 1 times as many keys.
    """

    def new_memory(self, pad):
        return Memories(ChainMemory, self.K + 1, pad)                   # (Eq. 2)

    def forward(self, gpt, x, memory):
        h = x
        for k in range(self.K + 1):
            h = gpt.trunk(h, memory[k])                                 # h_k
        return h


class SlotMemory(WeightedMemory):
    """
    One cache for all slots of all tokens, in a row: x_0 z_{0,1} ..  x_1 z_{1,1} .., so that a slot
    reads all that stand before it. The slots of the newest tokens can be taken back.
    """

    def begin(self, x):
        self.N_before = self.N      # slots of earlier tokens
        super().begin(x)            # which sets N to the number of tokens
        self.N = self.N_before      # here N counts slots; begin_pass adds the newest
        self.token_pos = self.pos   # (T,); begin_pass makes pos (T n,)

    def begin_pass(self, n=1, log_w=None):
        """
        Before a pass in which each of the newest tokens has n slots, side by side, which share its
        position. log_w (B, T n): of their keys (None: all weigh 1). Returns this memory.
        """
        self.pos = self.token_pos.repeat_interleave(n)                  # (T n,)
        self.N += len(self.pos)
        self.log_w = log_w
        if self.pad is not None:
            self.log_w = log_weight(self.is_token.repeat_interleave(n, dim=1), log_w)
        return self

    def rewind(self):
        """Forget the slots of the newest tokens: they were guesses."""
        n = self.N_before
        self.N = n
        # for n = 0 no entries, rather than empty ones, which `update` would copy for nothing
        self.keys = {layer: k[:, :, :n] for layer, k in self.keys.items() if n > 0}
        self.values = {layer: v[:, :, :n] for layer, v in self.values.items() if n > 0}


def side_by_side(slots):
    """The n slots of each token, (B,T,C) each, in a row, x_0 z_{0,1} .. x_1 ..: (B, T n, C)."""
    return torch.stack(slots, dim=2).flatten(1, 2)


class Pause(Mechanism):
    """
    Pause tokens (arXiv 2310.02226), a baseline of the papers: K copies of one learned embedding
    follow each token, at its position, and the last of them predicts the next token. Cost: one pass
    of K + 1 slots per token, each of which reads K + 1 times as many keys.
    """

    def __init__(self, config):
        super().__init__(config)
        if self.K > 0:  # else it would be a weight without a gradient
            self.pause = nn.Parameter(torch.randn(config.n_embd) * config.init_std)

    @staticmethod
    def default_embed_scale(C):
        return math.sqrt(C)     # as Embedding, in whose paper it is a baseline

    def new_memory(self, pad):
        return SlotMemory(pad)

    def forward(self, gpt, x, memory):
        n = self.K + 1
        pauses = [(self.pause * self.config.embed_scale).expand_as(x) for _ in range(self.K)]
        h = gpt.trunk(side_by_side([x, *pauses]), memory.begin_pass(n))
        return h[:, n - 1::n]                                           # (B,T,C)


class Latent(Mechanism):
    """
    PonderLM-2: Pretraining LLM with Latent Thoughts in Continuous Space (arXiv 2509.23184)

    K thoughts follow each token, at its position; each is what the trunk made of the slot before:

        x_0 z_{0,1} .. z_{0,K}  x_1 z_{1,1} ..          z_{t,k} = h_{t,k-1}, from the slot before

    What comes out of a token's last slot predicts the next token. (The paper takes one thought, as
    config/latent.py does. What it calls K is our R, a number of iterations.) Attention is causal
    over this row of slots, so a token's thoughts depend on all slots before them: the exact way is
    sequential. Training, and a text that is read at once, solve it by Jacobi iteration: guess all
    thoughts, run the trunk over all slots, take what comes out as the next guess. One such run is a
    sweep. For K = 2 thoughts and R = jacobi_iters (in training also R - 1) the slots of a token are

        sweep 0             x_t                     guesses z_{t,1}
        sweep 1             x_t  z_{t,1}            renews z_{t,1}, guesses z_{t,2}
        sweeps 2 .. R + 1   x_t  z_{t,1}  z_{t,2}   renew both
        sweep R + 2         x_t  z_{t,1}  z_{t,2}   gives the output, at the slot of z_{t,2}

    z_{t,k} is exact after t K + k sweeps, the output at token t after (t + 1) K + 1, where t counts
    from the first of the new tokens.

    Cost (K > 0): K (K + 1) / 2 + (R + 1) (K + 1) slots per token, which read up to K + 1 times the
    keys; in decoding K + 1 passes of one slot. Unlike in the authors' code, R is drawn for each
    optimizer step, not for each forward; and a prompt can be read exactly (`exact` in
    engine/generate.py).
    """

    def draws(self):
        """R or R - 1, as in the authors' Llama code, so that thoughts do not fit one R alone."""
        R = self.config.jacobi_iters
        return [R, max(R - 1, 0)]

    def new_memory(self, pad):
        return SlotMemory(pad)

    def forward(self, gpt, x, memory):
        if x.size(1) == 1 and not self.training:    # a single token: slot after slot
            for _ in range(self.K + 1):
                x = gpt.trunk(x, memory.begin_pass())
            return x

        outs = ()                       # outs[k], out of slot k, is the next guess of z_{t,k+1}
        for n in self.slots_of_sweeps():
            slots = [x, *outs[:n - 1]]  # x_t, z_{t,1} .. z_{t,n-1}
            outs = self.sweep(gpt, slots, memory)
        return outs[self.K]

    @staticmethod
    def sweep(gpt, slots, memory, log_w=None):
        """
        A pass over n slots of each token, (B,T,C) each -> what comes out of each. log_w (B, T n):
        as in SlotMemory.begin_pass.
        """
        n = len(slots)
        memory.rewind()                                 # what the sweep before left was a guess
        h = gpt.trunk(side_by_side(slots), memory.begin_pass(n, log_w))
        return h.unflatten(1, (-1, n)).unbind(2)        # (B, T n, C) -> n times (B,T,C)

    def slots_of_sweeps(self):
        """The slots of a token in each sweep: 1, 2, .. K, and after that K + 1, R + 1 times."""
        if self.K == 0:     # no thoughts to refine: one pass, whatever R is
            return [1]
        growing = list(range(1, self.K + 1))
        return growing + [self.K + 1] * (self.this_draw() + 1)


class Feedback(Mechanism):
    """
    Latent feedback: what the trunk made of a token joins the input of the next one. It is in the
    Full-bandwidth Transformer (arXiv 2608.08888), with a gate, and in the code of Depth-Attention's
    authors, who call it P2N and have no paper of it. Here there is no gate.

        h_t     = trunk(x_t + h_{t-1}), which attends to all tokens before it            h_{-1} = 0

    Thinking is carried along the text instead of being repeated in one place: a new token takes one
    pass and leaves one slot, as in the plain model. Computed exactly, this is sequential. Training,
    and a text that is read at once, solve it by iteration, as Latent does:

        h_{t,0} = trunk(x_t)            (the first x gets the h before it, if it is known)
        h_{t,k} = trunk(x_t + h_{t-1,k-1})                                              k = 1 .. K

    h_{t,k} is exact once k >= t, where t counts from the first of the new tokens. The loss reads
    the last pass; each optimizer step draws whether that is K or K - 1: trained with K = 3 alone,
    a model generated badly (docs/results.md). With K = 1 it is always pass 1.

    Cost: K + 1 passes to read a text, in training K + 1 or K (K > 1); in generation one.
    P2N scales x by 1 / sqrt(2) and h by 1 / sqrt(2 C); here both begin with RMS 1. P2N has no
    cached decoding; here a new token takes the first equation, with h_{t-1} from the memory.
    """

    def draws(self):
        """K or K - 1, as P2N; but not K - 1 = 0, where nothing would be fed back."""
        return [self.K, self.K - 1] if self.K > 1 else [self.K]

    def new_memory(self, pad):
        return SlotMemory(pad)          # one slot a token, which the next pass replaces

    def forward(self, gpt, x, memory):
        last = self.this_draw()                             # the last pass: K, or K - 1
        is_token = memory.is_token[..., None]                           # (B,T,1)
        carried = memory.carried                            # h of the token before these
        h = torch.zeros_like(x)                             # of no pass yet
        for _ in range(min(last + 1, x.size(1))):           # T passes are exact: for a token, one
            memory.rewind()                                 # what the pass before left was a guess
            h = gpt.trunk(x + shift(h, carried), memory.begin_pass())
            h = h.where(is_token, 0.0)                      # padding carries nothing on
        memory.carried = h[:, -1:] if last > 0 else None    # K = 0: nothing is fed back
        return h


PONDER = {'none': Plain, 'smear': Smear, 'loop': Loop, 'embedding': Embedding, 'chain': Chain,
          'pause': Pause, 'latent': Latent, 'feedback': Feedback}


# -------------------------------------------------------------------------------------------------
# 5  Halting: each token takes as many passes as it needs
#
# Five rules for four mechanisms of part 4. After a pass each token has a score, and once its score
# is below tau (the setting halt_tau) the token stops. Later tokens can still read it:
#
#     rule    works on   score              stops in training?  keys in passes    output
#                                                               not taken
#     Gate    Embedding  s, its gate        from halt_start on  of its last pass  of its last pass
#     Mask    Latent     w, p(needed)       no: keys fade       weight 0          weighted sum
#     Router  Chain      reach, p(reached)  always              weight 0          weighted sum
#     Exit    Loop       doubt              from halt_full on   of its last pass  of its last pass
#     Ouro    Loop       stay, p(not left)  no                  of its last pass  of its last pass
#
# halt_start and halt_full are shares of the training run. `onset` is 0 until the first, 1 from the
# second on, and a line between. Each docstring says what grows with it.
#
# Keys of Mask and Router always carry their weights. So their KV cache is (K + 1) (hd + 8) / hd
# times as large as a plain one, and that of the other rules K + 1 times.
#
# To add a rule for Loop: a subclass of LoopExit with `who_takes_next` and `penalty`; its name in
# HALTING; its settings in GPTConfig. Any other rule is a subclass of Halting: `works_on`,
# `defaults`, `new_memory`, `penalty`, and in `forward` the loop that follows.


class Halting(Mechanism):
    """
    A mechanism whose tokens stop by themselves. Gate, Router and LoopExit have this loop, each with
    equations of its own in it (in Mask slots take the place of passes):

        takes = memory.is_token                 (B,T): who takes the pass
        for k in range(K + 1):
            memory[k].begin_pass(takes)         the memory is told who takes this pass
            h = trunk(..)                       all tokens go through
            taken.append(takes)
            score = ..                          (B,T), after each pass but the last
            takes = takes & goes_on(score)      score >= tau; who stopped never takes one again
            if nobody takes the next: break     but not in training: most losses read all passes

    What comes out of a token that stopped is used by nobody but Gate's loss. So outside of training
    the passes end once all tokens of all rows have stopped. (For Router in training see
    engine/skip.py. A text that Mask reads by sweeps takes all slots.)

    A call leaves behind, for `loss` and for the tools:

        taken           who took pass (or slot) 0, 1, ..: (B,T) each
        kept.scores     the scores that decide who takes pass (or slot) 1, 2, ..: (B,T) each
        kept            also has what this class's loss reads: its `forward` says what

    In training it may be otherwise. Ouro's scores stop nobody, nor do Gate's before halt_start, and
    Exit has none before halt_full. Mask takes all slots: its `taken` says who would take them.

    Gate takes `mixture` from Embedding, and Mask the sweeps from Latent, so they inherit these; the
    others need nothing that Chain and Loop define.
    """
    works_on = None         # the `ponder` whose tokens it stops
    defaults = {}           # all four: halt_tau, halt_lambda, halt_start, halt_full

    def __init__(self, config):
        super().__init__(config)
        self.taken = []
        self.kept = None    # before the first call, and in training after `loss`. (Outside of
                            # training and of torch.no_grad it holds the graph of the last call.)

    @property
    def passes(self):
        """(B,T): how many passes each token took in the last call; None before the first."""
        return torch.stack(self.taken).sum(0) if self.taken else None

    def goes_on(self, score):
        """Whose score is high enough for another pass."""
        return score >= self.config.halt_tau

    def onset(self):
        """0 until halt_start, 1 from halt_full on, a line between: shares of the training run."""
        progress = self.from_begin_step(self.progress)
        start, full = self.config.halt_start, self.config.halt_full
        if progress >= full:
            return 1.0
        if progress <= start:
            return 0.0
        return (progress - start) / (full - start)

    def loss(self, gpt, h, targets):
        loss = self.predictions_loss(gpt, h, targets) + self.penalty(gpt, targets)
        self.kept = None    # it holds the graph: much RAM, and copy.deepcopy(gpt) would fail
        return loss

    def predictions_loss(self, gpt, h, targets):
        """The loss of predictions: of h (B,T,C), which `forward` returned, or of what it kept."""
        return gpt.loss(h, targets)

    def penalty(self, gpt, targets):
        """What is added to the loss of predictions; targets (B,T) as in GPT.forward."""
        raise NotImplementedError


def without_autocast(module, h):
    """
    module(h), computed in the dtype of its weights, whatever autocast says: bf16 is coarse beside
    halt_tau. The result is at least fp32.
    """
    device = h.device.type
    if not torch.amp.is_autocast_available(device):     # the meta device: shapes, no numbers
        device = 'cpu'
    with torch.autocast(device, enabled=False):
        weight_dtype = next(module.parameters()).dtype
        return at_least_fp32(module(h.to(weight_dtype)))


def catch_up(memory):
    """
    Before pass k reads its memory: append the keys and values that the memory lacks.

    In generation a call ends once all its tokens have stopped. Say token 5 stopped after pass 0,
    and token 6 takes pass 1: memory[1] ends with token 4, so token 5 must be appended first. What
    is appended is made by `stand_in` from token 5's keys and values in memory[0], the pass before:
    the same again (FrozenMemory), or keys of weight 0 (RouterMemory). memory[0] never lacks any,
    and memory[k - 1] has caught up when pass k begins.
    """
    if not memory.earlier:
        return
    before = memory.earlier[-1]
    n_old = memory.tokens - len(memory.pos)         # tokens of earlier calls
    for layer, keys in before.keys.items():
        n_has = memory.keys[layer].size(2) if layer in memory.keys else 0
        if n_has < n_old:
            lacks = slice(n_has, n_old)
            k, v = memory.stand_in(keys[:, :, lacks], before.values[layer][:, :, lacks])
            memory.keys[layer] = joined(memory.keys.get(layer), k)
            memory.values[layer] = joined(memory.values.get(layer), v)


class FrozenMemory(WeightedMemory):
    """The memory of a pass; a token that stopped has the keys and values of its last pass in it."""

    def begin_pass(self, takes):
        """To be called before each pass. takes (B,T): who takes it. Returns this memory."""
        catch_up(self)
        self.takes_pass = takes[:, None, :, None]                       # (B,1,T,1)
        return self

    def update(self, layer, k, v):
        if self.earlier:    # the last of which holds a stopped token's last keys and values
            old_k, old_v = self.earlier[-1].newest(layer, k.size(2))
            k = torch.where(self.takes_pass, k, old_k)
            v = torch.where(self.takes_pass, v, old_v)
        return super().update(layer, k, v)

    @staticmethod
    def stand_in(k, v):
        """Of earlier tokens that stopped, for catch_up: what they had in the pass before."""
        return k, v


class Gate(Halting, Embedding):
    """
    AdaPonderLM: Gated Pondering Language Models with Token-Wise Adaptive Depth (arXiv 2603.01914)

    PonderLM's passes, with a gate after each that scales what joins the input, or stops the token.
    (The paper writes i for k, and K for our K + 1. P_k and E_k are those of Embedding.)

        s_k     = sigmoid(MLP_k(h_k))            a gate after every pass but the last      (2), (3)
        m_{k+1} = m_k (s_k >= tau), m_0 = 1      who takes another pass: `takes`           (4), (5)
        E_{k+1} = E_k + m_{k+1} s_k P_k W        as in PonderLM, scaled by the gate      (6) to (9)
        a token with m_k = 0 keeps the keys and values of its last pass, in every layer        (10)
        loss   += halt_lambda * (mean of the lowest s_k)       over k and tokens with a target  (13)
                  lowest: a share of onset * halt_share of them                                 (14)

    Cost: that of Embedding in training, and 8 C^2 FLOPs per gate; in generation the passes taken.
    No public code. Where the paper is silent: before halt_start nobody stops in training, because
    cross-entropy alone would shut the gates for good; a stopped token's output is the hidden state
    of its last pass; (13) counts the gates of stopped tokens, too, which training computes; GELU;
    gates start near sigmoid(4) = 0.98, so that training begins nearly as PonderLM's.
    """
    works_on = 'embedding'
    defaults = dict(halt_tau=1e-4, halt_lambda=0.1, halt_start=0.4, halt_full=0.48)

    def __init__(self, config):
        super().__init__(config)
        C = config.n_embd
        self.gates = nn.ModuleList()
        for _ in range(self.K):
            self.gates.append(nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, 1)))

    def init_weights(self, gpt):
        super().init_weights(gpt)
        for gate in self.gates:
            nn.init.constant_(gate[-1].bias, 4.0)

    def new_memory(self, pad):
        return Memories(FrozenMemory, self.K + 1, pad)

    def forward(self, gpt, x, memory):
        takes = memory.is_token                                         # (B,T), m_0
        out = torch.zeros_like(x)                                       # (B,T,C)
        self.taken = []
        self.kept = SimpleNamespace(scores=[])
        for k in range(self.K + 1):
            h = gpt.trunk(x, memory[k].begin_pass(takes))               # h_k, (10)
            out = torch.where(takes[..., None], h, out)     # of the last pass that each token took
            self.taken.append(takes)
            if k == self.K:
                break
            s = without_autocast(self.gates[k], h).squeeze(-1).sigmoid()            # (2), (3)
            self.kept.scores.append(s)                                  # (B,T)
            if not self.training or self.from_begin_step(self.progress) >= self.config.halt_start:
                takes = takes & self.goes_on(s)                         # m_{k+1}, (4), (5)
            if not self.training and not takes.any():
                break
            joins = (takes * s)[..., None] * self.mixture(gpt, h)
            x = x + joins.to(x.dtype)                                   # E_{k+1}, (6) to (9)
        return out

    def penalty(self, gpt, targets):
        """(13), (14)"""
        is_target = targets >= 0                                        # (B,T)
        s = torch.stack(self.kept.scores)                               # (K,B,T)
        s = s.masked_fill(~is_target, math.inf)         # sorted behind those that count
        lowest_first = s.flatten().sort().values                        # (K B T,)
        share = self.onset() * self.config.halt_share                   # (14)
        n = (share * self.K * is_target.sum()).floor()  # a tensor: an int would wait for CUDA
        is_lowest = torch.arange(len(lowest_first), device=s.device) < n
        mean = lowest_first.where(is_lowest, 0.0).sum() / n.clamp(min=1)   # (13)
        return self.config.halt_lambda * mean


class Mask(Halting, Latent):
    """
    PonderLM-3: Adaptive Token-Wise Pondering with Differentiable Masking (arXiv 2603.02023)

    A router (no kin of the class Router) reads a token's own slot, and says how many of
    PonderLM-2's thoughts the token needs. From that follow the weight w of a thought's keys, and
    its share s of the output. (From Latent: its memory, R and sweeps.)

        s_t     = softmax(router(h_{t,0}))       how many thoughts token t needs, K + 1 outcomes
        w_{t,k} = sum_{j >= k} s_{t,j}           probability that thought k is needed; w_{t,0} = 1
        attention scores of key (t, k), in every layer, += log w_{t,k}
        output  = sum_k s_{t,k} h_{t,k}          h_{t,k}: hidden state at slot (t, k)

    A text is read by Latent's sweeps. After each sweep the router says s and w anew; its w are the
    weights of keys in the next sweep, and the output is that of the last sweep. In training keys
    only fade. Outside of training, thoughts with w < tau are hidden from the next sweep and from
    the output; s is not scaled back to a sum of 1. A hidden thought is computed all the same, since
    a later sweep may need it. A single new token takes slot after slot, while one is needed.

    halt_lambda * onset * the mean of the expected number of thoughts is added to the loss. The
    paper has a penalty, too, but we do not know its form: this one is ours.

    Cost: that of Latent in training; in decoding 1 + (the number of thoughts with w >= tau) slots.
    No public code, and the text of the paper was not available to us: the equations are those of
    its figure and of a reader's notes. Ours are also the linear router, R, and that s is not scaled
    back.
    """
    works_on = 'latent'
    defaults = dict(halt_tau=1e-4, halt_lambda=0.01, halt_start=0.4, halt_full=0.48)

    def __init__(self, config):
        super().__init__(config)
        self.router = nn.Linear(config.n_embd, self.K + 1)

    def route(self, h, is_token):
        """
        What the router says of slots 0 .. K of each token: slot 0 is the token's own, slot k that
        of thought k. h (B,T,C) came out of slot 0. Returns four tensors (B,T,K+1):

            s           the slot's share of the output
            w           probability that the slot is needed
            needed      whether that is high enough: w >= tau
            log_w       what attention adds to scores of the slot's key: log w; log 0 hides it
        """
        log_s = without_autocast(self.router, h).log_softmax(-1)
        # w_k = s_k + s_{k+1} + .. + s_K, summed from the end; in logs, as a tiny w would become 0
        log_w = log_s.flip(-1).logcumsumexp(-1).flip(-1)
        log_w = F.pad(log_w[..., 1:], (1, 0))           # the sum of all is 1: its log is exactly 0
        w = log_w.exp()
        needed = self.goes_on(w) & is_token[..., None]
        if not self.training:
            log_w = log_weight(needed, log_w)
        return log_s.exp(), w, needed, log_w

    def forward(self, gpt, x, memory):
        is_token = memory.is_token                                      # (B,T)
        # At first all weigh 1. (None would give keys without the 8 channels that cached ones have.)
        log_w = at_least_fp32(x.new_zeros(*x.shape[:2], self.K + 1))    # (B,T,K+1)
        if x.size(1) == 1 and not self.training:    # a single token: slot after slot
            h = gpt.trunk(x, memory.begin_pass(log_w=log_w[..., 0]))
            s, w, needed, log_w = self.route(h, is_token)               # (B,1,K+1) each
            outs = [h]                              # outs[k] comes out of slot k
            for k in range(1, self.K + 1):
                if not needed[..., k].any():
                    break
                h = gpt.trunk(h, memory.begin_pass(log_w=log_w[..., k]))
                outs.append(h)

        else:       # a text: sweeps of n slots, as in Latent
            outs = ()
            for n in self.slots_of_sweeps():
                outs = self.sweep(gpt, [x, *outs[:n - 1]], memory, log_w[..., :n].flatten(1))
                s, w, needed, log_w = self.route(outs[0], is_token)     # (B,T,K+1) each

        self.taken = needed.unbind(-1)              # (B,T) each
        self.kept = SimpleNamespace(s=s, scores=w[..., 1:].unbind(-1))
        share = s if self.training else s * needed      # a hidden thought has no share
        out = sum(share[..., k, None] * h_k for k, h_k in enumerate(outs))      # (B,T,C)
        return out.to(x.dtype)

    def penalty(self, gpt, targets):
        """halt_lambda * onset * the mean of the thoughts expected, sum_k k s_{t,k}."""
        is_target = targets >= 0                                        # (B,T)
        expected = (self.kept.s * torch.arange(self.K + 1, device=targets.device)).sum(-1)
        return self.config.halt_lambda * self.onset() * mean_where(is_target, expected)


class RouterMemory(ChainMemory):
    """A ChainMemory; in the passes that a token does not take, its keys have weight 0."""

    def begin_pass(self, takes):
        """To be called before each pass. takes (B,T): who takes it; padding never does."""
        catch_up(self)
        self.log_w = log_weight(takes)
        return self

    @staticmethod
    def stand_in(k, v):
        """Of earlier tokens that stopped, for catch_up: the same shapes, but keys of weight 0."""
        k, v = torch.zeros_like(k), torch.zeros_like(v)                 # (B, nkv, n, hd + 8)
        k[..., -WEIGHT_CHANNELS:] = LOG_ZERO    # c of WeightedMemory: anything that low will do
        return k, v


class Router(Halting):
    """
    Pretraining with Token-Level Adaptive Latent Chain-of-Thought (arXiv 2602.08220)

    The adaptive arm of Chain's paper: a token stops when its probability of getting further is
    small. The equations are of one token; the paper counts k from 1.

        g_k       = sigmoid(router(h_k))            whether to go on, k < K                      (3)
        reach_0   = 1,  reach_{k+1} = reach_k g_k                      probability of pass k + 1 (4)
        K*        = the last pass with reach >= tau                    later ones do not happen  (6)
        weight_k  = reach_k (1 - g_k) before K*, reach_k at K*                            (5), (7)
        output    = sum_k weight_k h_k                                                           (8)
        loss     += halt_lambda * onset * mean_t sum_{k <= K*, k < K} g_k (right_k)^beta   (9), (10)
                    right_k: the right token's probability after pass k, for gradients a constant

    Tokens stop from the first optimizer step on, as in the paper. So the loss has this term from
    then on, too: onset is 1 at once, unless halt_start and halt_full are set.

    Cost: the passes of Chain that are taken (in training with engine/skip.py), and in training a
    head for each right_k. No public code. Where the paper is silent: tau is 1e-4 as in AdaPonderLM,
    embeddings are scaled as in PonderLM-2, the router starts around 1/2, and we average over t.
    """
    works_on = 'chain'
    defaults = dict(halt_tau=1e-4, halt_lambda=0.4, halt_start=0.0, halt_full=0.0)   # at once

    def __init__(self, config):
        super().__init__(config)
        self.router = nn.Linear(config.n_embd, 1)

    def new_memory(self, pad):
        return Memories(RouterMemory, self.K + 1, pad)

    def forward(self, gpt, x, memory):
        h = x
        takes = memory.is_token                                         # (B,T)
        reach = 1.0                                                     # reach_k, later (B,T)
        out = 0.0                                                       # later (B,T,C)
        self.taken = []
        self.kept = SimpleNamespace(h=[], g=[], scores=[])              # of each pass but the last
        for k in range(self.K + 1):
            h = self.one_pass(gpt, h, memory[k], takes)                 # h_k, (B,T,C)
            self.taken.append(takes)
            if k == self.K:     # for all that got here K* is K
                out = out + (reach * takes)[..., None] * h                          # (7), (8)
                break
            g = without_autocast(self.router, h).squeeze(-1).sigmoid()              # (3), (B,T)
            next_reach = reach * g                                                  # (4)
            takes_next = takes & self.goes_on(next_reach)                           # (6)
            weight = torch.where(takes_next, reach * (1 - g), reach)                # (5), (7)
            out = out + (weight * takes)[..., None] * h                             # (8)
            self.kept.h.append(h)
            self.kept.g.append(g)
            self.kept.scores.append(next_reach)
            reach, takes = next_reach, takes_next
            if not self.training and not takes.any():
                break
        return out.to(x.dtype)

    @staticmethod
    def one_pass(gpt, h, memory, takes):
        """h_k (B,T,C) of h_{k-1}; a method, because in training engine/skip.py replaces it."""
        return gpt.trunk(h, memory.begin_pass(takes))

    def penalty(self, gpt, targets):
        """halt_lambda * onset * the mean over tokens of sum_k g_k (right_k)^beta."""
        total = 0.0                                                     # later (B,T)
        # zip ends before the last pass: taken has one more than h and g
        for h, g, takes in zip(self.kept.h, self.kept.g, self.taken):
            with torch.no_grad():
                right = gpt.token_losses(h, targets).neg().exp()        # (B,T)
            total = total + takes * g * right ** self.config.halt_beta
        return self.config.halt_lambda * self.onset() * mean_where(targets >= 0, total)  # (9), (10)


class LoopExit(Halting):
    """
    What Exit and Ouro share: the passes of Loop, after each of which tokens may leave.

        x_0     = x
        x_{k+1} = blocks(x_k)               with loop_norm: norm(blocks(x_k))           k = 0 .. K
        h_k     = norm(x_{k+1})             with loop_norm: x_{k+1}
        L_k     = cross-entropy of head(h_k) with the next token
        output  = h_k of the last pass that the token took

    Once a token has left, h_k and L_k stay those of its last pass, and later tokens read the keys
    and values of that pass. A subclass says in `who_takes_next` who takes pass k + 1. Unlike in
    Loop, earlier passes are no sources of Depth-Attention.
    """
    works_on = 'loop'
    defaults = dict(halt_tau=0.02, halt_lambda=0.1, halt_start=0.5, halt_full=0.7)

    def new_memory(self, pad):
        return Memories(FrozenMemory, self.K + 1, pad)

    def forward(self, gpt, x, memory):
        loop_norm = self.config.loop_norm
        takes = memory.is_token                                         # (B,T)
        h = torch.zeros_like(x)                                         # (B,T,C), of no pass yet
        self.taken = []
        self.kept = SimpleNamespace(h=[], scores=[])                    # kept.h: h_0, h_1, ..
        for k in range(self.K + 1):
            x = gpt.trunk(x, memory[k].begin_pass(takes), norm=loop_norm)           # x_{k+1}
            new_h = x if loop_norm else gpt.ln_f(x)
            h = torch.where(takes[..., None], new_h, h)     # h_k; who left before keeps its last
            self.taken.append(takes)
            self.kept.h.append(h)
            if k == self.K:
                break
            takes = self.who_takes_next(gpt, h, takes)
            if not self.training and not takes.any():
                break
        return h

    def who_takes_next(self, gpt, h, takes):
        """
        (B,T): who takes pass k + 1. takes (B,T): who took pass k; h (B,T,C): h_k. The score that it
        compares with tau, if any, joins self.kept.scores.
        """
        raise NotImplementedError


class Exit(LoopExit):
    """
    Exits from the looped Transformer by confidence (arXiv 2607.20519)

        P_k     = softmax(head(h_k))        what the model would predict after pass k
        doubt_k = 1 - the largest of P_k    a token stops once it is below tau
        loss    = sum_k prior_k mean L_k    over tokens with a target

    h_k and L_k are those of LoopExit. No parameters are added. prior_k says which passes must
    predict. It is fixed, by exit_loss:

        last        prior_k = 1 for k = K, else 0
        uniform     prior_k = 1 / (K + 1)
        ramp        prior_k = (k + 1) / (1 + 2 + .. + (K + 1))

    Three things are ours:

    1. The prior sets in late. Until halt_start it is that of 'last'. From there to halt_full it
       turns into that of exit_loss: prior = (1 - onset) of 'last' + onset of exit_loss.
    2. Tokens stop in training, too, from halt_full on. So later tokens learn to read the keys of
       tokens that stopped, as they must in generation.
    3. Tokens of questions learn to stay. A negative target marks such a token: nothing is to be
       predicted there, but all that follows reads it, so it should take every pass. Therefore

           loss += halt_lambda * onset / K * sum_{k<K} (mean of U_k)
                   the mean is over such tokens that took pass k
           U_k   = cross-entropy of P_k with equal probabilities for all tokens

       This pulls P_k towards equal probabilities. There doubt is high, so the token goes on.

    Cost: K + 1 passes, in generation as many as are taken. There the head runs after each pass but
    pass K, for doubt, and once more for the output: for a token that stops after one pass it runs
    twice. In training there are heads after earlier passes, too: from halt_start on for uniform and
    ramp, and for questions if there are any; from halt_full on to know who stops.
    """

    def who_takes_next(self, gpt, h, takes):
        if self.training and self.from_begin_step(self.progress) < self.config.halt_full:
            return takes            # nobody stops yet; no score either, it would cost a head
        with torch.no_grad():
            doubt = 1 - self.confidence(gpt, h)                         # (B,T)
        self.kept.scores.append(doubt)
        return takes & self.goes_on(doubt)

    @staticmethod
    @some_rows_at_once
    def confidence(gpt, h):
        """The largest probability of head(h): (.., C) -> (..)."""
        return at_least_fp32(gpt.head(h)).softmax(-1).amax(-1)

    def prior(self):
        """[prior_0, .., prior_K] at this point of the run."""
        n = self.K + 1
        only_last = [0] * self.K + [1]
        chosen = {'last': only_last, 'uniform': [1] * n,
                  'ramp': range(1, n + 1)}[self.config.exit_loss]
        onset = self.onset()
        total = sum(chosen)
        return [(1 - onset) * old + onset * new / total for old, new in zip(only_last, chosen)]

    def predictions_loss(self, gpt, h, targets):
        return sum(prior_k * gpt.loss(h_k, targets)
                   for prior_k, h_k in zip(self.prior(), self.kept.h) if prior_k > 0)

    def penalty(self, gpt, targets):
        """
        halt_lambda * onset / K * the sum over k < K of the mean of U_k, over tokens of questions
        that took pass k.
        """
        question = targets < 0                                          # (B,T)
        factor = self.config.halt_lambda * self.onset()
        if factor == 0 or not question.any():
            return 0.0      # any() waits for the GPU; but where there are none, K heads are saved
        total = 0.0
        for h, takes in zip(self.kept.h[:self.K], self.taken):
            U = self.cross_entropy_with_uniform(gpt, h)                 # (B,T), U_k
            total = total + mean_where(question & takes, U)
        return factor * total / self.K

    @staticmethod
    @some_rows_at_once
    def cross_entropy_with_uniform(gpt, h):
        """Of head(h), with equal probabilities as its target: (.., C) -> (..)."""
        logits = at_least_fp32(gpt.head(h))[..., :gpt.config.n_tokens]
        return logits.logsumexp(-1) - logits.mean(-1)


class Ouro(LoopExit):
    """
    Exits from the looped Transformer by a learned gate: Ouro, Scaling Latent Reasoning via Looped
    Language Models (arXiv 2510.25741)

        lam_k   = sigmoid(Linear(h_k))          k < K: the gate, probability that a token which took
                                                pass k leaves after it; one Linear for all passes
        stay_k  = (1 - lam_0) .. (1 - lam_k)    probability of taking pass k + 1, too; a token stops
                                                once it is below tau
        p_k     = stay_{k-1} - stay_k           probability that pass k is the last, where
                                                stay_{-1} = 1 and stay_K = 0                     (3)

    h_k and L_k are those of LoopExit. (The paper counts passes from 1. It writes p_k as
    lam_k stay_{k-1}, which for k < K is the same number. Its threshold q is 1 - tau. Its norm
    follows every pass, so config/halting_ouro.py sets loop_norm=True.)

    In training nobody stops. There are two stages, ouro_stage:

    1. All weights learn. The loss is the mean, over tokens with a target, of

           sum_k p_k L_k - halt_lambda H                                                         (4)
           H = -sum_k p_k log p_k               entropy: highest if any pass may be the last

    2. The gate alone learns whether the next pass gains. The loss is the mean, over all tokens, of

           1 / (K+1) * sum_{k<K} (cross-entropy of 1 - lam_k with wanted_k)                      (6)
           wanted_k = sigmoid(50 (gain_k - 0.005))
           gain_k = max(0, L_k - L_{k+1})       so wanted_k > 1/2 if this is above 0.005         (5)

    Two things are ours:

    1. Tokens of questions (with negative targets) learn to stay, for the reason that Exit has. In
       stage 1 the loss has one more term,

           halt_lambda * onset / K * sum_{k<K} (mean of -log(1 - lam_k) over these tokens)

       and in stage 2 their wanted_k is 1. Both pull lam_k to 0.
    2. gain_k is what pass k + 1 gains, because lam_k decides about that pass. The paper compares
       lam_k with the gain of pass k itself.

    As long as no token stops, Router has the same numbers by other names: stay_k is its
    reach_{k+1}, p_k its weight_k.

    Cost: K + 1 passes, in generation those that are taken; in training a head after each. (The
    authors' code runs all passes, and then picks one.)
    """
    defaults = dict(LoopExit.defaults, halt_tau=0.5)

    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Linear(config.n_embd, 1)

    def init_weights(self, gpt):
        super().init_weights(gpt)
        if self.config.ouro_stage == 2:     # the gate alone is trained, so all else is frozen here
            gpt.requires_grad_(False)
            self.requires_grad_(True)

    def logit(self, h):
        """(B,T) of h (B,T,C): lam = sigmoid(logit), so 1 - lam = sigmoid(-logit)."""
        return without_autocast(self.gate, h).squeeze(-1)

    def who_takes_next(self, gpt, h, takes):
        stay_before = self.kept.scores[-1] if self.kept.scores else 1.0     # stay_{k-1}
        stay = stay_before * torch.sigmoid(-self.logit(h))                  # (B,T)
        self.kept.scores.append(stay)       # in training too: predictions_loss reads it
        return takes if self.training else takes & self.goes_on(stay)

    def predictions_loss(self, gpt, h, targets):
        if self.config.ouro_stage == 2:
            return self.gate_loss(gpt, targets)
        stay = self.kept.scores                                         # stay_0 .. stay_{K-1}
        p = [before - after for before, after in zip([1.0, *stay], [*stay, 0.0])]           # (3)
        expected = sum(p_k * gpt.token_losses(h_k, targets)
                       for p_k, h_k in zip(p, self.kept.h))             # (B,T)
        tiny = torch.finfo(stay[0].dtype).tiny      # at p = 0 the gradient of p log p would be NaN
        entropy = -sum(p_k * p_k.clamp(min=tiny).log() for p_k in p)    # (B,T)
        return mean_where(targets >= 0, expected - self.config.halt_lambda * entropy)   # (4)

    def penalty(self, gpt, targets):
        """Stage 1's term for questions: see above, the first of what is ours."""
        if self.config.ouro_stage == 2:
            return 0.0          # gate_loss has it in wanted_k
        pull = sum(F.softplus(self.logit(h)) for h in self.kept.h[:self.K])     # -log(1 - lam_k)
        return self.config.halt_lambda * self.onset() * mean_where(targets < 0, pull) / self.K

    def gate_loss(self, gpt, targets):
        """Stage 2: the gate learns whether the next pass gains."""
        with torch.no_grad():
            L = [gpt.token_losses(h, targets) for h in self.kept.h]     # L_0 .. L_K, (B,T) each
        total = 0.0
        for k in range(self.K):
            gain = (L[k] - L[k + 1]).clamp(min=0)                       # (5)
            wanted = torch.sigmoid(50 * (gain - 0.005))                 # of 1 - lam_k
            wanted = wanted.masked_fill(targets < 0, 1.0)               # a question's token stays
            logit_of_stay = -self.logit(self.kept.h[k])                 # of 1 - lam_k
            total = total + F.binary_cross_entropy_with_logits(logit_of_stay, wanted)   # (6)
        return total / (self.K + 1)     # (6) divides K terms by the number of passes


HALTING = {'gate': Gate, 'mask': Mask, 'router': Router, 'exit': Exit, 'ouro': Ouro}


def new_mechanism(config):
    """The mechanism of a GPTConfig; with K = 0 there is nothing to halt."""
    if config.halting != 'none' and config.ponder_steps > 0:
        return HALTING[config.halting](config)
    return PONDER[config.ponder](config)


# -------------------------------------------------------------------------------------------------
# 6  Checks: which settings make sense


def check_values(c):
    """ValueError for a number out of its range, or an unknown choice, of a GPTConfig."""
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
        for name in ('halt_tau', 'halt_lambda', 'halt_start', 'halt_full'):
            require(getattr(c, name) is not None,
                    f"{name}=None: add it to {HALTING[c.halting].__name__}.defaults, or set it")
        require(c.halt_start <= c.halt_full,
                f"halt_start={c.halt_start} is above halt_full={c.halt_full}: change one of them")
