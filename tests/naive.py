"""
The model as the papers have it: one slot at a time, one head at a time, one loop per sum. Slow on
purpose. It shares nothing with model.py but the settings and the names of the weights, so where the
two agree, both are likely right.

A token is read completely, with all its passes or thoughts, before the next one begins. What was
read before stands in a Stack: for each slot its keys and values. A slot is one pass of one token.

    rms .. Stack            the plain GPT, and Depth-Attention in it
    plain .. pause          pondering: one function per mechanism
    gate .. leave           halting: the same, and how many passes a token took
    logits                  a text, token by token

Papers are often misread. Wrong variants (`wrong`, and the arguments of Stack) serve as negative
controls: a test that cannot tell them from the right one would prove nothing.

    Stack     anchors='raw'       sources enter with their raw values, not with their mixed ones
              stride='relative'   sources are counted from the layer, not from layer 0
              cache='raw'         later slots read raw values
    wrong     'replace'           embedding: mixtures replace each other instead of adding up
              'one cache'         embedding, loop: all passes share one
              'all visible'       chain, router: a slot reads steps that are still to come
              'own positions'     latent: thoughts have positions of their own
              'alone'             smear, feedback: nothing is carried along
              'sums'              smear: what is carried along is the sum, not the embedding
              'norm between'      loop: the final norm after every loop, which is loop_norm
              'readout moves'     gate: a stopped token's hidden state goes on changing
              'keys move'         gate: its keys and values do
              'no fading'         mask: thoughts that are hardly needed count in full
"""

import math

import torch

# -------------------------------------------------------------------------------------------------
# The plain GPT


def rms(x, gain, eps):
    """x / rms(x) * gain"""
    return x / torch.sqrt((x * x).mean() + eps) * gain


def rotate(x, t, theta):
    """One head's vector at position t: the pair (i, i + hd/2) turns by t theta^(-2i / hd)."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = t * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def sigmoid(number):
    return 1 / (1 + math.exp(-number))


def softmax(numbers):
    """exp(a) / sum of exp(b), for each a of a list."""
    powers = [math.exp(number) for number in numbers]
    return [power / sum(powers) for power in powers]


def depth_attention(query, keys, values, mode):
    """
    One head of one slot: the mixed value. keys and values are those of the sources, and last the
    layer's own; query is the mean of the queries that share this key head.
    """
    scores = [0.0] * len(keys)  # mode 'uniform': a plain average
    if mode == 'softmax':
        scores = [float(query @ key) / math.sqrt(len(key)) for key in keys]      # (Eq. 2)
    return sum(weight * value for weight, value in zip(softmax(scores), values))  # (Eq. 3)


class Stack:
    """
    The blocks and what they remember. keys and values: [layer][slot][key head], vectors of hd
    numbers. steps and bias: [slot].
    """

    def __init__(self, model, anchors='mixed', stride='absolute', cache='mixed'):
        self.c, self.w = model.config, model.state_dict()
        self.anchors, self.stride, self.cache = anchors, stride, cache
        self.keys = [[] for _ in range(self.c.n_layer)]
        self.values = [[] for _ in range(self.c.n_layer)]
        self.steps = []     # the number of the pass that made the slot
        self.bias = []      # what is added to all scores against it

    def read(self, x, t, step=0, upto=None, earlier=(), bias=0.0):
        """
        What the blocks make of x (C,), a new slot at position t. step: its number; upto: the last
        step whose slots it may read (None: all). earlier: (keys, values) of this token's earlier
        loops, each [layer][key head]. bias: on the scores of this slot as a key.
        """
        self.steps.append(step)
        self.bias.append(bias)
        visible = [i for i, other in enumerate(self.steps) if upto is None or other <= upto]

        keys, mixed, raw = [], [], []  # this slot's: [layer][key head]
        for layer in range(self.c.n_layer):
            h = rms(x, self.weight(layer, 'ln_1'), self.c.norm_eps)
            q, k, v = self.heads(layer, h, t)
            keys.append(k)
            raw.append(v)
            sources = mixed if self.anchors == 'mixed' else raw
            mixed.append(self.mixed_values(layer, q, v, keys, sources, earlier))
            x = x + self.attention(layer, q, k, v, mixed[layer], visible)
            h = rms(x, self.weight(layer, 'ln_2'), self.c.norm_eps)
            x = x + self.mlp(layer, h)
        self.own = keys, mixed
        return x

    def weight(self, layer, name):
        return self.w[f'h.{layer}.{name}.weight']

    def heads(self, layer, h, t):
        """Queries [query head], keys and values [key head] of one slot."""
        c = self.c
        vectors = list((self.weight(layer, 'attn.c_attn') @ h).view(-1, c.head_dim))
        q = vectors[:c.n_head]
        k = vectors[c.n_head:c.n_head + c.n_kv_head]
        v = vectors[c.n_head + c.n_kv_head:]
        if c.qk_norm:
            q = [rms(head, self.weight(layer, 'attn.q_norm'), c.norm_eps) for head in q]
            k = [rms(head, self.weight(layer, 'attn.k_norm'), c.norm_eps) for head in k]
        q = [rotate(head, t, c.rope_theta) for head in q]
        k = [rotate(head, t, c.rope_theta) for head in k]
        return q, k, v

    def mixed_values(self, layer, q, v, keys, values, earlier):
        """
        Values [key head] after Depth-Attention, of a slot that has keys [layer][key head] up to
        this layer, and values to serve as sources of those below it.
        """
        c = self.c
        if not c.depth_attn:
            return v
        shared = c.n_head // c.n_kv_head  # query heads of each key head
        mixed = []
        for n in range(c.n_kv_head):
            ks = [loop_keys[layer][n] for loop_keys, _ in earlier]
            vs = [loop_values[layer][n] for _, loop_values in earlier]
            for source in self.sources(layer):
                ks.append(keys[source][n])
                vs.append(values[source][n])
            query = sum(q[n * shared:(n + 1) * shared]) / shared
            mixed.append(depth_attention(query, ks + [keys[layer][n]], vs + [v[n]], c.depth_mode))
        return mixed

    def sources(self, layer):
        """The earlier layers whose values are mixed into this one's."""
        if self.stride == 'absolute':
            return [j for j in range(layer) if j % self.c.depth_stride == 0]
        return [j for j in range(layer) if (layer - j) % self.c.depth_stride == 0]

    def attention(self, layer, q, k, v, mixed, visible):
        """Keep this slot's keys and values; then what its queries find in the visible slots."""
        c = self.c
        self.keys[layer].append(k)
        self.values[layer].append(mixed if self.cache == 'mixed' else v)
        readable = self.values[layer][:-1] + [mixed]  # a wrong cache shows from the next slot on
        shared = c.n_head // c.n_kv_head
        heads = []
        for n in range(c.n_head):
            scores = []
            for i in visible:
                score = q[n] @ self.keys[layer][i][n // shared] / math.sqrt(c.head_dim)
                scores.append(score + self.bias[i])                              # (Eq. 4)
            weights = torch.stack(scores).softmax(0)
            heads.append(sum(a * readable[i][n // shared] for a, i in zip(weights, visible)))
        return self.weight(layer, 'attn.c_proj') @ torch.cat(heads)

    def mlp(self, layer, h):
        """SwiGLU."""
        gate, up = (self.weight(layer, 'mlp.c_fc') @ h).split(self.c.mlp_hidden)
        return self.weight(layer, 'mlp.c_proj') @ (gate * torch.sigmoid(gate) * up)

    def norm(self, x):
        """The final norm."""
        return rms(x, self.w['ln_f.weight'], self.c.norm_eps)

    def trunk(self, x, t, **how):
        """The hidden state (C,) of a new slot."""
        return self.norm(self.read(x, t, **how))

    def copy(self, other):
        """Take over the newest slot of another stack, without a pass of its own."""
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values):
            mine.append(theirs[-1])
        self.steps.append(0)
        self.bias.append(0.0)

    def drop(self):
        """Forget the newest slot."""
        for slots in [*self.keys, *self.values, self.steps, self.bias]:
            slots.pop()


class Slow:
    """What a mechanism has at hand: config c, weights w, K, a stack for each pass, the head."""

    def __init__(self, model, wrong, variants):
        self.c, self.w = model.config, model.state_dict()
        self.K = self.c.ponder_steps
        self.wrong = wrong
        self.stacks = [Stack(model, **variants) for _ in range(self.K + 1)]
        if wrong == 'one cache':
            self.stacks = self.stacks[:1] * (self.K + 1)
        self.stack = self.stacks[0]  # where all passes of a token share one, as the papers say
        self.table = self.w['wte.weight'] * self.c.embed_scale                   # (V,C)

    def head(self, h):
        """Logits (V,)."""
        z = self.w['lm_head.weight'] @ h
        z[self.c.n_tokens:] = -math.inf
        return z

    def mixture(self, h):
        """The mean embedding of the next token, (C,)."""
        z = self.head(h)
        if self.c.ponder_topk:
            z[z < z.topk(self.c.ponder_topk).values[-1]] = -math.inf
        return sum(p * row for p, row in zip(z.softmax(0), self.table))

    def own(self, name):
        """A weight that the mechanism adds."""
        return self.w[f'mechanism.{name}']


# -------------------------------------------------------------------------------------------------
# Pondering: from the embedding x (C,) of the token at t to the hidden state that predicts the next


def plain(gpt, x, t):
    return gpt.stack.trunk(x, t)


def smear(gpt, x, t):
    """Smear: h_t = trunk(x_t + x_{t-1})."""
    both = x
    if t > 0 and gpt.wrong != 'alone':
        both = x + gpt.before
    gpt.before = both if gpt.wrong == 'sums' else x
    return gpt.stack.trunk(both, t)


def embedding(gpt, x, t):
    """PonderLM: E_{k+1} = E_k + P_k W, each pass with a cache of its own."""
    start = x
    for stack in gpt.stacks[:-1]:
        h = stack.trunk(x, t)
        x = (start if gpt.wrong == 'replace' else x) + gpt.mixture(h)
    return gpt.stacks[-1].trunk(x, t)


def latent(gpt, x, t):
    """PonderLM-2: each thought is the hidden state of the slot before it, at the same position."""
    h = x
    for k in range(gpt.K + 1):
        position = t * (gpt.K + 1) + k if gpt.wrong == 'own positions' else t
        h = gpt.stack.trunk(h, position)
    return h


def chain(gpt, x, t):
    """Adaptive Latent CoT, fixed length: step k reads the slots of steps up to k, (Eq. 2)."""
    h = x
    for k in range(gpt.K + 1):
        upto = None if gpt.wrong == 'all visible' else k
        h = gpt.stack.trunk(h, t, step=k, upto=upto)
    return h


def loop(gpt, x, t):
    """All blocks K + 1 times, the final norm once. Depth-Attention: earlier loops are sources."""
    earlier = []
    norm_between = gpt.c.loop_norm != (gpt.wrong == 'norm between')
    for stack in gpt.stacks:
        x = stack.read(x, t, earlier=earlier)
        if norm_between:
            x = stack.norm(x)
        earlier.append(stack.own)
    return x if norm_between else gpt.stack.norm(x)


def pause(gpt, x, t):
    """Pause tokens: K copies of one learned embedding follow each token, at its position."""
    h = gpt.stack.trunk(x, t)
    for _ in range(gpt.K):
        h = gpt.stack.trunk(gpt.own('pause') * gpt.c.embed_scale, t)
    return h


def feedback(gpt, x, t):
    """Latent feedback: the hidden state of the token before joins the input."""
    if t > 0 and gpt.wrong != 'alone':
        x = x + gpt.before
    gpt.before = gpt.stack.trunk(x, t)
    return gpt.before


PONDER = {'none': plain, 'smear': smear, 'embedding': embedding, 'latent': latent, 'chain': chain,
          'loop': loop, 'pause': pause, 'feedback': feedback}


# -------------------------------------------------------------------------------------------------
# Halting: the same, and how many passes the token took


def gate(gpt, x, t):
    """AdaPonderLM, equations (2) to (10)."""
    for i, stack in enumerate(gpt.stacks):
        h = stack.trunk(x, t)
        if i == gpt.K:
            return h, i + 1
        s = sigmoid(gate_mlp(gpt, i, h))                                         # (2), (3)
        if s < gpt.c.halt_tau:                                                   # (4), (5)
            break
        x = x + s * gpt.mixture(h)                                               # (6) to (9)

    later = gpt.stacks[i + 1:]
    if gpt.wrong == 'keys move':
        for other in later:
            other.read(x, t)
        return h, i + 1
    if gpt.wrong == 'readout moves':
        for other in later:
            h = other.trunk(x, t)
            other.drop()
    for other in later:  # later tokens find this one's last keys and values there
        other.copy(stack)                                                        # (10)
    return h, i + 1


def gate_mlp(gpt, i, h):
    """Linear, exact GELU, Linear to one number."""
    a = gpt.own(f'gates.{i}.0.weight') @ h + gpt.own(f'gates.{i}.0.bias')
    a = a * 0.5 * (1 + torch.erf(a / math.sqrt(2)))
    return gpt.own(f'gates.{i}.2.weight')[0] @ a + gpt.own(f'gates.{i}.2.bias')[0]


def mask(gpt, x, t):
    """PonderLM-3, outside of training: thoughts that are hardly needed do not exist."""
    h = gpt.stack.trunk(x, t)
    need = softmax(gpt.own('router.weight') @ h + gpt.own('router.bias'))        # s_t
    out = need[0] * h
    for k in range(1, gpt.K + 1):
        needed = sum(need[k:])                                                   # w_{t,k}
        if needed < gpt.c.halt_tau:
            return out, k
        bias = 0.0 if gpt.wrong == 'no fading' else math.log(needed)
        h = gpt.stack.trunk(h, t, bias=bias)
        out = out + need[k] * h
    return out, gpt.K + 1


def router(gpt, x, t):
    """Adaptive Latent CoT, equations (3) to (8)."""
    out = 0
    reach = 1.0                                                                  # of step k
    z = x
    for k in range(gpt.K + 1):
        upto = None if gpt.wrong == 'all visible' else k
        z = gpt.stack.trunk(z, t, step=k, upto=upto)
        g = 0.0
        if k < gpt.K:
            g = sigmoid(gpt.own('router.weight')[0] @ z + gpt.own('router.bias')[0])  # (3)
        if k == gpt.K or reach * g < gpt.c.halt_tau:                             # (6): K* = k
            return out + reach * z, k + 1                                        # (7), (8)
        out = out + reach * (1 - g) * z                                          # (5), (8)
        reach = reach * g                                                        # (4)


def leave(gpt, x, t):
    """Ouro's exits, and those by confidence: the newest keys of a token that left are read."""
    survival = 1.0                                                               # S_t
    for k, stack in enumerate(gpt.stacks):
        x = stack.read(x, t)
        h = stack.norm(x)
        if gpt.c.loop_norm:
            x = h
        if k == gpt.K:
            return h, k + 1
        if gpt.c.halting == 'ouro':
            survival *= 1 - sigmoid(gpt.own('gate.weight')[0] @ h + gpt.own('gate.bias')[0])
            doubt = survival
        else:
            doubt = 1 - float(gpt.head(h)[:gpt.c.n_tokens].softmax(0).max())
        if doubt < gpt.c.halt_tau:
            break
    for other in gpt.stacks[k + 1:]:
        if gpt.wrong == 'keys move':
            x = other.read(x, t)
        else:
            other.copy(stack)
    return h, k + 1


HALTING = {'gate': gate, 'mask': mask, 'router': router, 'exit': leave, 'ouro': leave}


# -------------------------------------------------------------------------------------------------
# A text


def logits(model, tokens, wrong=None, passes=None, **variants):
    """
    Logits (T,V) of a list of tokens. wrong, variants: see above. passes: a list to which, with
    halting, the number of passes of each token is added.
    """
    gpt = Slow(model, wrong, variants)
    rows = []
    for t, token in enumerate(tokens):
        x = gpt.table[token]
        if gpt.c.halting != 'none':
            h, taken = HALTING[gpt.c.halting](gpt, x, t)
            if passes is not None:
                passes.append(taken)
        elif gpt.c.ponder in PONDER:
            h = PONDER[gpt.c.ponder](gpt, x, t)
        else:
            raise NotImplementedError(f"ponder={gpt.c.ponder!r} has no slow version here yet")
        rows.append(gpt.head(h))
    return torch.stack(rows)
