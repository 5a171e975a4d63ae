"""
What students write, as text. NEAR: one slip in the right answer of exercises/answers.py, and words
of the sentence that should answer it. UNUSUAL: right, but not as one would expect.
"""

REFUSED = ''  # with any sentence

NEAR = [  # (exercise, what stands in answers.py, what is written in its place, words)
    # attention
    ('attention', 'g, T = q.size(1) // k.size(1)', 'g, T = k.size(1)', REFUSED),
    ('attention', 'k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)',
     'k[:, torch.arange(q.size(1)) // k.size(1) % k.size(1)], '
     'v[:, torch.arange(q.size(1)) // k.size(1) % k.size(1)]', REFUSED),
    ('attention', 'k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)',
     'k.repeat(1, g, 1, 1), v.repeat(1, g, 1, 1)', 'mixes up the groups'),
    ('attention', 'k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)',
     'k.repeat_interleave(g, dim=1), v.repeat(1, g, 1, 1)', REFUSED),
    ('attention', 'math.sqrt(q.size(-1))', 'math.sqrt(16)', r'divides by sqrt\(16\)'),
    ('attention', 'math.sqrt(q.size(-1))', 'math.sqrt(q.size(1) * 4)', REFUSED),
    ('attention', 'math.sqrt(q.size(-1))', 'q.size(-1)', 'not by its square root'),
    ('attention', '-math.inf', '-1e4', 'the mask should be -inf'),
    ('attention', 'scores.masked_fill(~seen, -math.inf)', '(scores - 1e4 * ~seen)',
     'the mask should be -inf'),
    ('attention', ', device=q.device', '', 'say device=q.device'),
    ('attention', '.tril()', '.triu()', 'upside down'),
    ('attention', '.softmax(-1)', '.softmax(-2)', 'do not sum to 1'),
    ('attention', '.softmax(-1) @ v', '.exp() @ v', REFUSED),
    # rope
    ('rope', '-torch.arange(0, hd, 2) / hd', '-torch.arange(0, hd, 2) / 8', REFUSED),
    ('rope', '-torch.arange(0, hd, 2) / hd', '-torch.arange(hd // 2) / hd', 'exponent -i / hd'),
    ('rope', '-torch.arange(0, hd, 2) / hd', '-torch.arange(1, hd + 1, 2) / hd', REFUSED),
    ('rope', 'theta **', '10_000.0 **', REFUSED),
    ('rope', 'a * cos - b * sin, a * sin + b * cos', 'a * cos + b * sin, b * cos - a * sin',
     'turns the wrong way'),
    ('rope', 'a * sin + b * cos', 'a * cos + b * sin', REFUSED),
    ('rope', 'x.chunk(2, dim=-1)', 'x[..., 0::2], x[..., 1::2]', REFUSED),
    ('rope', 'angles(pos, x.size(-1), theta)', 'angles(pos, 8, theta)', REFUSED),
    ('rope', 'angles(pos, x.size(-1), theta)', 'angles(pos, x.size(-1), 100.0)', REFUSED),
    ('rope', '[:, None]\n    cos', '[:, None].detach().round()\n    cos', REFUSED),
    # kv_cache
    ('kv_cache', 'v = torch.cat((self.v[layer], v), dim=2)', 'v = v', 'only the new values'),
    ('kv_cache', 'torch.cat((self.k[layer], k), dim=2)', 'torch.cat((k, self.k[layer]), dim=2)',
     REFUSED),
    ('kv_cache', 'self.k[0].size(2)', 'self.k[0].size(1)', REFUSED),
    ('kv_cache', '.tril(n)', '.tril(n - 1)', REFUSED),
    ('kv_cache', '.tril(n)', '.tril(S)', REFUSED),
    ('kv_cache', 'dtype=torch.bool, device=device).tril', 'dtype=torch.bool).tril',
     'makes its mask on the CPU'),
    ('kv_cache', 'torch.arange(out.size(1) - new.size(1), out.size(1))',
     'torch.arange(new.size(1)) + (out.size(1) if new is not prompt else 0)', 'count on'),
    ('kv_cache', 'gpt.head(h[:, -1])', 'gpt.lm_head(h[:, -1])', 'padding'),
    ('kv_cache', 'gpt.head(h[:, -1])', 'gpt.head(h[:, 0])', 'argmax'),
    ('kv_cache', 'range(n)', 'range(n - 1)', REFUSED),
    # depth_attention
    ('depth_attention', 'B, nkv, -1, T, hd).mean(2)', 'B, -1, nkv, T, hd).mean(1)',
     'neighbours belong together'),
    ('depth_attention', 'B, nkv, -1, T, hd).mean(2)', 'B, nkv, -1, T, hd).sum(2)',
     'should be averaged'),
    ('depth_attention', 'math.sqrt(hd)', 'math.sqrt(8)', r'divides by sqrt\(8\)'),
    ('depth_attention', '.softmax(0)', '.softmax(1)', REFUSED),
    ('depth_attention', '(q * keys)', '(k * keys)', 'by its key'),
    ('depth_attention', 'mix(q, k, v, anchors)', 'mix(q, k, v, anchors[-1:])', 'only the newest'),
    ('depth_attention', 'anchors + [(k, mixed[-1])]', 'anchors + [(k, v)]', 'mixes raw values'),
    ('depth_attention', 'if layer % stride == 0', 'if layer % stride == 1 or stride == 1', REFUSED),
    ('depth_attention', 'if layer % stride == 0', 'if layer % 2 == 0', REFUSED),
    ('depth_attention', 'sum(-1, keepdim=True) / math.sqrt(hd)', 'sum(-1, keepdim=True)',
     'forgets to divide'),
    # pondering
    ('pondering', 'range(steps)', 'range(steps + 1)', 'one pass too many'),
    ('pondering', 'range(steps)', 'range(2)', REFUSED),
    ('pondering', 'x = x + p @', 'x = gpt.embed(idx) + p @', 'join the running sum'),
    ('pondering', 'x + p @ (gpt.wte.weight * gpt.config.embed_scale)',
     'x + (p @ (gpt.wte.weight * gpt.config.embed_scale)).roll(1, 1)', REFUSED),
    ('pondering', 'gpt.config.embed_scale)', '4.0)', REFUSED),
    ('pondering', 'gpt.config.embed_scale)', 'gpt.config.n_embd ** 0.5)', REFUSED),
    ('pondering', 'gpt.wte.weight', 'gpt.lm_head.weight', 'rows of the head'),
    ('pondering', 'gpt.head(gpt.trunk', 'gpt.lm_head(gpt.trunk', 'padded rows'),
    ('pondering', '(x, pos)).softmax(-1)', '(x, pos)).detach().softmax(-1)', 'gradient is lost'),
    ('pondering', '(x, pos)).softmax(-1)', '(x, pos)).softmax(1)', REFUSED),
    # jacobi
    ('jacobi', '    slots, results = [], []\n', '    return jacobi(gpt, x, x.size(1))\n    slots, '
     'results = [], []\n', r'calls jacobi\(\)'),
    ('jacobi', 'torch.arange(len(slots)) // 2', 'torch.arange(len(slots))', 'position of its own'),
    ('jacobi', 'z = h[:, 0::2]', 'z = h[:, 1::2]', "thoughts' slots back"),
    ('jacobi', 'torch.stack((x, z), dim=2).flatten(1, 2)', 'torch.cat((x, z), dim=1)', REFUSED),
    ('jacobi', 'torch.stack((x, z), dim=2)', 'torch.stack((z, x), dim=2)', REFUSED),
    ('jacobi', 'pos.repeat_interleave(2)', 'pos.repeat(2)', REFUSED),
    ('jacobi', 'range(iterations + 1)', 'range(iterations)', REFUSED),
    ('jacobi', 'range(iterations + 1)', 'range(iterations + 2)', 'one iteration more'),
    ('jacobi', 'z = gpt.trunk(x, pos)', 'z = x', REFUSED),
    ('jacobi', 'return T - 1', 'return T', 'more than it takes'),
    ('jacobi', 'return T - 1', 'return min(T - 1, 6)', 'is too few'),
    # halting
    ('halting', '(g >= tau)', '(g >= 0.5)', 'tau is an argument'),
    ('halting', '(g >= tau)', '(g > tau)', 'nobody halts while g >= tau'),
    ('halting', 'm = m & (g >= tau)', 'm = g >= tau', 'never wakes up again'),
    ('halting', '(m * g)[..., None]', 'm[..., None]', 'the gate should scale it'),
    ('halting', '(m * g)[..., None]', 'g[..., None]', None),  # right: what halted is not read again
    ('halting', 'self.before.k[layer])\n', 'self.before.k[0])\n', 'of another layer'),
    ('halting', 'torch.where(m, v', 'torch.where(~m, v', 'wrong way round'),
    ('halting', '            v = torch.where(m, v, self.before.v[layer])\n', '', 'all values anew'),
    ('halting', 'm[..., None], h, readout', 'm[..., None], readout, h', REFUSED),
    ('halting', 'passes = m.long()', 'passes = 0 * m.long()', 'the first one included'),
    ('halting', 'Frozen(gpt.config.n_layer, m, memory)', 'Frozen(gpt.config.n_layer)', REFUSED),
    ('halting', 'gate(h).sigmoid()', 'gate(h)', 'the sigmoid of it is g'),
    ('halting', 'gate(h).sigmoid()', 'gate(h).detach().sigmoid()', 'gradient is lost'),
    # flops
    ('flops', '3 * c.n_embd * c.mlp_hidden', '2 * c.n_embd * c.mlp_hidden', 'two matrices'),
    ('flops', '2 * T * width)', 'T * width)', 'counts half of attention'),
    ('flops', '2 * T * width)', '2 * T * kv_width)', 'n_kv_head heads in attention too'),
    ('flops', '(width + 2 * kv_width)', '3 * width', 'as many heads as the queries have'),
    ('flops', '(width + 2 * kv_width) + width * c.n_embd',
     '(c.n_embd + 2 * kv_width) + c.n_embd ** 2', REFUSED),  # right only where nh hd = C
    ('flops', 'return trunk + head\n', 'return trunk + c.n_layer * head\n', 'head in every layer'),
    ('flops', '(s + 1) * (trunk + head) + s * head', '(s + 1) * trunk + 2 * s * head',
     'counts s heads'),
    ('flops', '(s + 1) * (trunk + head) + s * head', '(s + 1) * (trunk + head) + (s + 1) * head',
     'mixture after the last pass'),
    ('flops', '(s + 1) * (trunk + head) + s * head', '4 * (trunk + head) + 3 * head',
     r'should be forward_flops\(\)'),
    ('flops', '    pondering =', '    s = 3\n    pondering =', 'counts 3 steps'),
    ('flops', '4 * s * (head + head)', '3 * s * (head + head)', 'forward pass alone'),
    ('flops', '3 * ((s + 1) * trunk + head) + 4 * s', '3 * (s + 1) * trunk + 4 * head + 4 * s',
     'weighs the last head'),
    ('flops', 'tokens * pondering', 'tokens * 4 * ponder_flops(c, T)', 'weighs everything'),
]

UNUSUAL = [  # (exercise, what is written)
    ('attention', '''
def attention(q, k, v):
    """Position by position, head by head."""
    y = torch.empty_like(q)
    for h in range(q.size(1)):
        shared = h * k.size(1) // q.size(1)
        for t in range(q.size(2)):
            scores = (k[:, shared, :t + 1] * q[:, h, t, None]).sum(-1) / q.size(-1) ** 0.5
            y[:, h, t] = (scores.softmax(-1)[..., None] * v[:, shared, :t + 1]).sum(1)
    return y
'''),
    ('attention', '''
def attention(q, k, v):
    """Groups as an axis of their own, and the mask by comparison."""
    B, nh, T, hd = q.shape
    q = q.view(B, k.size(1), -1, T, hd) * hd ** -0.5
    scores = torch.einsum('bngtd,bnud->bngtu', q, k)
    t = torch.arange(T, device=q.device)
    scores = scores.where(t[:, None] >= t, torch.finfo(q.dtype).min)
    return torch.einsum('bngtu,bnud->bngtd', scores.softmax(-1), v).reshape(B, nh, T, hd)
'''),
    ('attention', '''
def attention(q, k, v):
    """A softmax of one's own, in float64 on the way."""
    g, T, hd = q.size(1) // k.size(1), q.size(2), q.size(3)
    k, v = (x.repeat_interleave(g, 1).double() for x in (k, v))
    scores = q.double() @ k.mT * hd ** -0.5
    scores = scores + torch.full((T, T), -math.inf, device=q.device).triu(1)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True) @ v).to(q.dtype)
'''),
    ('rope', '''
def angles(pos, hd, theta):
    return torch.stack([pos / theta ** (2 * i / hd) for i in range(hd // 2)], dim=1)


def rotate(x, pos, theta):
    """Complex numbers."""
    a, b = x.chunk(2, -1)
    angle = angles(pos, x.size(-1), theta)[:, None]
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)
'''),
    ('rope', '''
def angles(pos, hd, theta):
    return torch.outer(pos.float(), torch.exp(-math.log(theta) * torch.arange(0, hd, 2) / hd))


def rotate(x, pos, theta):
    """x cos + half-turned x sin."""
    angle = angles(pos, x.size(-1), theta).repeat(1, 2)[None, :, None]
    a, b = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-b, a), -1) * angle.sin()
'''),
    ('rope', '''
def angles(pos, hd, theta):
    return torch.tensor([[float(p) * theta ** (-2 * i / hd) for i in range(hd // 2)] for p in pos])


def rotate(x, pos, theta):
    """A matrix of rotations for each position."""
    half = x.size(-1) // 2
    angle = angles(pos, 2 * half, theta)
    cos, sin = torch.diag_embed(angle.cos()), torch.diag_embed(angle.sin())
    turn = torch.cat((torch.cat((cos, -sin), 2), torch.cat((sin, cos), 2)), 1)
    return torch.einsum('sij,bshj->bshi', turn, x)
'''),
    ('kv_cache', '''
class Cache:
    """Lists of pieces, joined when they are read; the mask by comparing positions."""

    def __init__(self, n_layer):
        self.k = [[] for _ in range(n_layer)]
        self.v = [[] for _ in range(n_layer)]

    def update(self, layer, k, v):
        self.k[layer].append(k)
        self.v[layer].append(v)
        return torch.cat(self.k[layer], 2), torch.cat(self.v[layer], 2)

    def mask(self, S, device):
        n = sum(k.size(2) for k in self.k[0])
        new = n + torch.arange(S, device=device)
        return new[:, None] >= torch.arange(n + S, device=device)


def generate(gpt, prompt, n):
    """The prompt token by token too."""
    cache, out = Cache(gpt.config.n_layer), prompt
    for t in range(prompt.size(1) + n - 1):
        h = gpt.trunk(gpt.embed(out[:, t:t + 1]), torch.tensor([t]), cache)
        if t + 1 >= prompt.size(1):
            token = gpt.head(h)[:, -1].max(-1).indices
            out = torch.cat((out, token[:, None]), 1)
    return out
'''),
    ('kv_cache', '''
class Cache:
    """Room for all that may come, and no mask where none is needed."""

    def __init__(self, n_layer):
        self.room = [None] * n_layer
        self.used = [0] * n_layer

    def update(self, layer, k, v):
        if self.room[layer] is None:
            B, nkv, _, hd = k.shape
            self.room[layer] = k.new_zeros(2, B, nkv, 64, hd)
        begin = self.used[layer]
        end = self.used[layer] = begin + k.size(2)
        self.room[layer][0, :, :, begin:end] = k
        self.room[layer][1, :, :, begin:end] = v
        return self.room[layer][0, :, :, :end], self.room[layer][1, :, :, :end]

    def mask(self, S, device):
        if self.used[0] == 0 or S == 1:
            return None
        n = self.used[0]
        left = torch.ones(S, n, dtype=torch.bool, device=device)
        return torch.cat((left, torch.ones(S, S, dtype=torch.bool, device=device).tril()), 1)


def generate(gpt, prompt, n):
    cache = Cache(gpt.config.n_layer)
    h = gpt.trunk(gpt.embed(prompt), torch.arange(prompt.size(1)), cache)
    tokens = [prompt]
    for place in range(prompt.size(1), prompt.size(1) + n):
        tokens.append(gpt.head(h[:, -1:]).argmax(-1))
        h = gpt.trunk(gpt.embed(tokens[-1]), torch.tensor([place]), cache)
    return torch.cat(tokens, 1)
'''),
    ('kv_cache', '''
class Cache:
    """One tensor for keys and values; a mask with an axis for rows and heads."""

    def __init__(self, n_layer):
        self.both = {}

    def update(self, layer, k, v):
        new = torch.stack((k, v))
        if layer in self.both:
            new = torch.cat((self.both[layer], new), dim=-2)
        self.both[layer] = new
        return list(new)

    def mask(self, S, device):
        n = self.both[0].size(-2) if self.both else 0
        return ~torch.ones(S, n + S, device=device).triu(n + 1).bool()[None, None]


def generate(gpt, prompt, n):
    if n == 0:
        return prompt
    cache = Cache(gpt.config.n_layer)
    return torch.cat((prompt, *more(gpt, cache, prompt, 0, n)), 1)


def more(gpt, cache, new, begin, n):
    pos = torch.arange(begin, begin + new.size(1))
    token = gpt.head(gpt.trunk(gpt.embed(new), pos, cache)[:, -1:]).argmax(-1)
    if n == 1:
        return [token]
    return [token, *more(gpt, cache, token, begin + new.size(1), n - 1)]
'''),
    ('depth_attention', '''
def mix(q, k, v, sources):
    """A softmax by hand, layer by layer."""
    q = q.unflatten(1, (k.size(1), -1)).mean(2) / k.size(-1) ** 0.5
    weights = [(q * k_j).sum(-1, keepdim=True).exp() for k_j, _ in sources + [(k, v)]]
    mixed = sum(w * v_j for w, (_, v_j) in zip(weights, sources + [(k, v)]))
    return mixed / sum(weights)


def mix_all(layers, stride):
    mixed = []
    for l, (q, k, v) in enumerate(layers):
        sources = [(layers[j][1], mixed[j]) for j in range(0, l, stride)]
        mixed.append(mix(q, k, v, sources) if sources else v)
    return mixed
'''),
    ('depth_attention', '''
def mix(q, k, v, sources):
    """Depth as an axis to attend over."""
    keys, values = zip(*sources, (k, v))
    B, nkv, T, hd = k.shape
    q = q.view(B, nkv, q.size(1) // nkv, T, hd).sum(2) * nkv / q.size(1)
    a = torch.einsum('bntd,lbntd->bntl', q, torch.stack(keys)).div(hd ** 0.5).softmax(-1)
    return torch.einsum('bntl,lbntd->bntd', a, torch.stack(values))


def mix_all(layers, stride):
    anchors, mixed = {}, {}
    for l in range(len(layers)):
        q, k, v = layers[l]
        mixed[l] = mix(q, k, v, list(anchors.values())) if anchors else v
        if not l % stride:
            anchors[l] = (k, mixed[l])
    return list(mixed.values())
'''),
    ('depth_attention', '''
def mix(q, k, v, sources):
    """Head by head, with the own layer first."""
    g = q.size(1) // k.size(1)
    heads = []
    for n in range(k.size(1)):
        mean = sum(q[:, n * g + i] for i in range(g)) / g
        pairs = [(k, v), *sources]
        scores = torch.stack([(mean * a[:, n]).sum(-1) for a, _ in pairs], -1)
        a = F.softmax(scores / mean.size(-1) ** 0.5, -1).unbind(-1)
        heads.append(sum(a[i][..., None] * pairs[i][1][:, n] for i in range(len(pairs))))
    return torch.stack(heads, 1)


def mix_all(layers, stride):
    def upto(l):
        if l not in done:
            q, k, v = layers[l]
            below = [(layers[j][1], upto(j)) for j in range(l) if j % stride == 0]
            done[l] = mix(q, k, v, below)
        return done[l]
    done = {}
    return tuple(upto(l) for l in range(len(layers)))
'''),
    ('pondering', '''
def ponder(gpt, idx, steps, x=None):
    """Recursion."""
    pos = torch.arange(idx.size(1))
    x = gpt.embed(idx) if x is None else x
    if steps == 0:
        return gpt.trunk(x, pos)
    p = torch.softmax(gpt.head(gpt.trunk(x, pos)), 2)
    return ponder(gpt, idx, steps - 1, x + gpt.config.embed_scale * (p @ gpt.wte.weight))
'''),
    ('pondering', '''
def ponder(gpt, idx, steps):
    """The used rows of the table only, and the first pass in front of the loop."""
    T, n = idx.shape[1], gpt.config.n_tokens
    E = [gpt.wte(idx) * gpt.config.embed_scale]
    h = gpt.trunk(E[0], torch.arange(T))
    while len(E) <= steps:
        P = (gpt.lm_head(h)[..., :n]).log_softmax(-1).exp()
        W = gpt.wte.weight[:n] * gpt.config.embed_scale
        E.append(E[-1] + torch.einsum('btv,vc->btc', P, W))
        h = gpt.trunk(E[-1], torch.arange(T))
    return h
'''),
    ('pondering', '''
def ponder(gpt, idx, steps):
    """Row by row."""
    rows = []
    for row in idx.split(1):
        total = gpt.embed(row)
        for _ in range(steps):
            z = gpt.head(gpt.trunk(total, torch.arange(row.size(1))))
            z = (z - z.max()).exp()
            mean = (z / z.sum(-1, keepdim=True)).matmul(gpt.wte.weight)
            total = total + mean * gpt.config.embed_scale
        rows.append(gpt.trunk(total, torch.arange(row.size(1))))
    return torch.cat(rows)
'''),
    ('jacobi', '''
def sequential(gpt, x):
    """Over all slots each time; those still unknown are zeros, which nobody before them sees."""
    T = x.size(1)
    slots = torch.zeros(x.size(0), 2 * T, x.size(2))
    slots[:, 0::2] = x
    for t in range(T):
        slots[:, 2 * t + 1] = gpt.trunk(slots, torch.arange(2 * T) // 2)[:, 2 * t]
    return gpt.trunk(slots, torch.arange(2 * T) // 2)[:, 1::2]


def jacobi(gpt, x, iterations):
    T = x.size(1)
    z = gpt.trunk(x, torch.arange(T))
    for i in range(iterations + 1):
        pairs = [part for t in range(T) for part in (x[:, t], z[:, t])]
        h = gpt.trunk(torch.stack(pairs, 1), torch.arange(T).repeat_interleave(2))
        z = h.view(x.size(0), T, 2, -1)[:, :, 0]
    return h.view(x.size(0), T, 2, -1)[:, :, 1]


def iterations_needed(T):
    return len(range(1, T))
'''),
    ('jacobi', '''
def both(gpt, x, z):
    slots = torch.cat((x[:, :, None], z[:, :, None]), 2).reshape(x.size(0), -1, x.size(2))
    pos = torch.arange(x.size(1))
    return gpt.trunk(slots, torch.stack((pos, pos), 1).view(-1)).unflatten(1, (-1, 2)).unbind(2)


def sequential(gpt, x):
    """A text that grows by a token, whose earlier thoughts are known."""
    z = x[:, :0]
    for t in range(x.size(1)):
        new, _ = both(gpt, x[:, :t + 1], torch.cat((z, x[:, t:t + 1]), 1))
        z = torch.cat((z, new[:, t:]), 1)
    return both(gpt, x, z)[1]


def jacobi(gpt, x, iterations):
    z = gpt.trunk(x, torch.arange(x.size(1)))
    for _ in range(iterations):
        z, _ = both(gpt, x, z)
    return both(gpt, x, z)[1]


def iterations_needed(T):
    return max(0, T - 1)
'''),
    ('jacobi', '''
def sequential(gpt, x):
    """Each row by itself."""
    rows = []
    for row in x.split(1):
        slots = row[:, :0]
        out = []
        for t in range(x.size(1)):
            for new in (row[:, t:t + 1], None):
                slots = torch.cat((slots, out[-1] if new is None else new), 1)
                pos = torch.arange(slots.size(1)).div(2, rounding_mode='floor')
                out.append(gpt.trunk(slots, pos)[:, -1:])
        rows.append(torch.cat(out[1::2], 1))
    return torch.cat(rows)


def jacobi(gpt, x, iterations, z=None):
    """Recursion."""
    pos = torch.arange(x.size(1))
    if z is None:
        z = gpt.trunk(x, pos)
    twice = (pos[:, None] + torch.zeros(2).long()).flatten()
    h = gpt.trunk(torch.stack((x, z), 2).flatten(1, 2), twice)
    if iterations == 0:
        return h[:, 1::2]
    return jacobi(gpt, x, iterations - 1, h[:, ::2])


def iterations_needed(T):
    return T + ~0
'''),
    ('halting', '''
class Frozen:
    """Arithmetic in the place of where."""

    def __init__(self, n_layer, active=None, before=None):
        self.k, self.v = {}, {}
        self.active, self.before = active, before

    def update(self, layer, k, v):
        if self.before:
            m = self.active[:, None, :, None].to(k.dtype)
            k = m * k + (1 - m) * self.before.k[layer]
            v = m * v + (1 - m) * self.before.v[layer]
        self.k[layer] = k
        self.v[layer] = v
        return [k, v]

    def mask(self, S, device):
        return None


def think(gpt, gates, x, pos, tau):
    """A last gate that is always shut; E of halted tokens moves on, which nobody reads."""
    m = torch.ones(x.shape[:2], dtype=torch.bool)
    readout, passes, memory = torch.zeros_like(x), torch.zeros_like(m, dtype=torch.long), None
    for i in range(len(gates) + 1):
        memory = Frozen(gpt.config.n_layer, m, memory)
        h = gpt.trunk(x, pos, memory)
        readout = h * m[..., None] + readout * ~m[..., None]
        passes = passes + m
        if i < len(gates):
            g = torch.sigmoid(gates[i](h))
            m = m & (g[..., 0] >= tau)
            x = x + g * mixture(gpt, h)
    return readout, passes
'''),
    ('halting', '''
class Frozen:
    """Through indices."""

    def __init__(self, n_layer, active=None, before=None):
        self.k = [None] * n_layer
        self.v = [None] * n_layer
        self.active = active
        self.before = before

    def update(self, layer, k, v):
        if self.before is not None:
            k, v = k.clone(), v.clone()
            row, t = (~self.active).nonzero(as_tuple=True)
            k[row, :, t] = self.before.k[layer][row, :, t]
            v[row, :, t] = self.before.v[layer][row, :, t]
        self.k[layer], self.v[layer] = k, v
        return k, v

    def mask(self, S, device):
        return None


def think(gpt, gates, x, pos, tau):
    """All passes first, the readout afterwards."""
    m = [torch.ones(x.shape[:2], dtype=torch.bool)]
    memory, h = Frozen(gpt.config.n_layer), []
    for gate in [*gates, None]:
        h.append(gpt.trunk(x, pos, memory))
        if gate is None:
            break
        g = gate(h[-1]).sigmoid().squeeze(-1)
        m.append(m[-1] & ~(g < tau))
        x = x + (g * m[-1]).unsqueeze(-1) * mixture(gpt, h[-1])
        memory = Frozen(gpt.config.n_layer, m[-1], memory)
    passes = torch.stack(m).sum(0)
    last = (passes - 1)[None, :, :, None].expand(1, *x.shape)
    return torch.stack(h).gather(0, last)[0], passes
'''),
    ('halting', '''
class Frozen:
    """The memories of all passes before, looked through from the newest."""

    def __init__(self, n_layer, active=None, before=None):
        self.k = [None] * n_layer
        self.v = [None] * n_layer
        self.active = active
        self.before = before

    def update(self, layer, k, v):
        self.k[layer] = self.kept(k, 'k', layer)
        self.v[layer] = self.kept(v, 'v', layer)
        return self.k[layer], self.v[layer]

    def kept(self, new, what, layer):
        if self.before is None:
            return new
        return new.where(self.active[:, None, :, None], getattr(self.before, what)[layer])

    def mask(self, S, device):
        return None


def think(gpt, gates, x, pos, tau, m=None, memory=None):
    """Recursion: a pass, and what comes after it."""
    first = m is None
    if first:
        m = torch.ones(x.shape[:2], dtype=torch.bool)
    memory = Frozen(gpt.config.n_layer, None if first else m, memory)
    h = gpt.trunk(x, pos, memory)
    if len(gates) == 0:
        return h, m.long()
    g = gates[0](h).sigmoid()[..., 0]
    on = m & (g >= tau)
    x = x + (on * g)[..., None] * mixture(gpt, h)
    readout, passes = think(gpt, gates[1:], x, pos, tau, on, memory)
    return torch.where(on[..., None], readout, h), passes + m
'''),
    ('flops', '''
def matmul(m, k, n):
    return 2 * m * k * n


def trunk(c, T):
    """Matrix by matrix."""
    one = 0
    for heads in (c.n_head, c.n_kv_head, c.n_kv_head):
        one += matmul(1, c.n_embd, heads * c.head_dim)
    for _ in range(c.n_head):
        one += matmul(1, c.head_dim, T) + matmul(1, T, c.head_dim)
    one += matmul(1, c.n_head * c.head_dim, c.n_embd)
    one += matmul(1, c.n_embd, 2 * c.mlp_hidden) + matmul(1, c.mlp_hidden, c.n_embd)
    return c.n_layer * one


def forward_flops(c, T):
    return trunk(c, T) + matmul(1, c.n_embd, c.vocab_size)


def ponder_flops(c, T):
    mixing = matmul(1, c.vocab_size, c.n_embd)
    return forward_flops(c, T) * (c.ponder_steps + 1) + mixing * c.ponder_steps


def fair_tokens(c, T, tokens):
    head = matmul(1, c.n_embd, c.vocab_size)
    once_more = 2 * c.ponder_steps * head
    return tokens * (3 * ponder_flops(c, T) + once_more) / forward_flops(c, T) / 3
'''),
    ('flops', '''
def forward_flops(c, T):
    """In floats, from the number of weights."""
    kv = c.n_kv_head / c.n_head
    width = c.n_head * c.head_dim
    layer = 2.0 * c.n_embd * width * (2 + 2 * kv) + 6.0 * c.n_embd * c.mlp_hidden + 4.0 * T * width
    return c.n_layer * layer + 2.0 * c.n_embd * c.vocab_size


def ponder_flops(c, T):
    total = forward_flops(c, T)
    for _ in range(c.ponder_steps):
        total += forward_flops(c, T) + 2.0 * c.vocab_size * c.n_embd
    return total


def fair_tokens(c, T, tokens):
    C, V, s = c.n_embd, c.vocab_size, c.ponder_steps
    trunk = forward_flops(c, T) - 2 * C * V
    forward = (s + 1) * trunk + 2 * C * V + s * 4 * C * V
    backward = 2 * forward + s * 4 * C * V
    return (forward + backward) / (3 * forward_flops(c, T)) * tokens
'''),
    ('flops', '''
def forward_flops(c, T, steps=0):
    C, V, hd = c.n_embd, c.vocab_size, c.head_dim
    a = C * hd * (c.n_head + c.n_kv_head + c.n_kv_head) + c.n_head * hd * C
    b = 2 * sum(T * hd for _ in range(c.n_head))
    d = C * 2 * c.mlp_hidden + c.mlp_hidden * C
    return 2 * ((steps + 1) * (c.n_layer * (a + b + d) + C * V) + steps * V * C)


def ponder_flops(c, T):
    return forward_flops(c, T, steps=c.ponder_steps)


def fair_tokens(c, T, tokens):
    again = 4 * c.ponder_steps * c.vocab_size * c.n_embd
    return tokens + tokens * (3 * (ponder_flops(c, T) - forward_flops(c, T)) + again) / (
        3 * forward_flops(c, T))
'''),
]
