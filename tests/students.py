"""
What students write. SLIPS: for each exercise, one slip in the right answer of exercises/answers.py,
and words of the sentence that should answer it. UNUSUAL: right, but not as one would expect.
"""

ANY = ''  # with any sentence: the numbers that are drawn tell it from a right one

# what stands in answers.py several times over
SHARED = 'k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)'
ANGLES = 'pos[:, None] * theta ** (-torch.arange(0, hd, 2) / hd)'
TURNED = 'torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)'
MIXED = 'x + p @ (gpt.wte.weight * gpt.config.embed_scale)'
PONDER = '(K + 1) * (trunk + head) + K * head'
FAIR = 'tokens * ponder_flops(c, T) / forward_flops(c, T)'
BEGIN = '        cache.begin(x)\n'

READS = '        readout = torch.where(m[..., None], h, readout)\n'

SLIPS = {  # exercise: [(what stands in answers.py, what is written in its place, words)]
    'attention': [
        ('.masked_fill(~seen, -math.inf)', '', 'sees the future: without a mask'),
        ('.tril()', '.triu()', 'mask upside down'),
        ('scores.masked_fill(~seen, -math.inf)', '(scores * seen)', r'exp\(0\) is 1'),
        ('masked_fill(~seen', 'masked_fill(seen', 'is the mask the right way round'),
        ('dtype=torch.bool, device=q.device', 'device=q.device', 'tensor of True and False'),
        (SHARED, SHARED.replace('(g', '(q.size(1) / k.size(1)'), 'Whole numbers come from //'),
        ('math.sqrt(q.size(-1))', 'torch.sqrt(q.size(-1))', 'functions of torch take a tensor'),
        ('~seen, -math.inf).softmax(-1) @ v', '~seen, -math.inf).softmax(-1).matmul(v).half()',
         r'^attention\(\) holds numbers of type torch.float16'),
        (' / math.sqrt(q.size(-1))', '', r'forgets to divide the scores by sqrt\(hd\)'),
        ('math.sqrt(q.size(-1))', 'q.size(-1)', 'not by its square root'),
        ('/ math.sqrt(q.size(-1))', '* math.sqrt(q.size(-1))', 'multiplies the scores'),
        ('math.sqrt(q.size(-1))', 'math.sqrt(16)', r'divides by sqrt\(16\)'),
        ('math.sqrt(q.size(-1))', 'math.sqrt(q.size(1) * 4)', ANY),
        ('math.sqrt(q.size(-1))', 'math.sqrt(T)', 'the number of positions'),
        ('math.sqrt(q.size(-1))', 'math.sqrt(q.size(1) * q.size(3))', 'the width of all heads'),
        ('q @ k.transpose(-1, -2)', 'k @ q.transpose(-1, -2)', 'queries and keys swapped'),
        ('.softmax(-1) @ v', '.softmax(-1) @ k', 'keys instead of values'),
        ('.softmax(-1) @ v', '.softmax(-2) @ v', 'do not sum to 1'),
        ('scores.masked_fill(~seen, -math.inf).softmax(-1)', '(scores.softmax(-1) * seen)',
         'the mask belongs before the softmax'),
        ('.tril()', '.tril(1)',
         'sees the future: changing position 4 and later ones changes it at position 3'),
        ('.tril()', '.tril(-1)', 'may each position read itself'),
        ('-math.inf', '-100.0', 'the mask should be -inf'),
        ('-math.inf', '-1e6', 'the mask should be -inf'),
        ('return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v',
         'e = scores.masked_fill(~seen, -math.inf).exp()\n    return e / e.sum(-1, True) @ v',
         "subtract each row's maximum first"),
        (SHARED, 'k.repeat(1, g, 1, 1), v.repeat(1, g, 1, 1)', 'mixes up the groups'),
        (SHARED,
         '[x[:, (torch.arange(g * x.size(1)) // x.size(1)).clamp(max=x.size(1) - 1)] if g > 1 else '
         'x for x in (k, v)]', 'read key/value head h // 2'),
        (SHARED,
         '[x[:, :1] if g > 1 else x for x in (k, v)]', 'all query heads read key/value head 0'),
        ('.softmax(-1) @ v', '.softmax(-1) @ v / 2', 'all numbers are 0.5 times'),
        ('.softmax(-1) @ v', '.softmax(-1) @ v * 0', 'all zeros'),
        ('return scores.masked', 'q *= 2\n    return scores.masked', 'arguments in place'),
        ('return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v',
         'return F.scaled_dot_product_attention(q, k, v, is_causal=True)', 'are to write yourself'),
        ('.softmax(-1) @ v', '.softmax(-1) @ v.detach()', 'part of the gradient is lost'),
        ('.softmax(-1) @ v', '.softmax(-1).half() @ v.half()', 'numbers of type torch.float16'),
        ('.softmax(-1) @ v', '.softmax(-1).half().float() @ v', 'rounded to 16 bits'),
        ('.softmax(-1) @ v', '.softmax(-1) @ v[:, :, :1].expand_as(v)', 'right only at position 0'),
        ('~seen, -math.inf).softmax(-1) @ v',
         '~seen, -math.inf).softmax(-1).matmul(v).transpose(1, 2)', 'Axes 1 and 2 are swapped'),
        ('~seen, -math.inf).softmax(-1) @ v',
         '~seen, -math.inf).softmax(-1).matmul(v).transpose(1, 2).reshape(q.shape)',
         'right numbers in the wrong places'),
        ('    return scores.masked', '    scores.masked', 'does its last line say `return`'),
    ],
    'rope': [
        ('pos[:, None] * theta', '(pos - pos.min())[:, None] * theta', 'from the smallest'),
        ('pos[:, None] * theta', 'torch.arange(len(pos))[:, None] * theta', 'ignores pos'),
        ('pos[:, None] * theta', '(pos[:, None] + 1) * theta', 'counts positions from 1'),
        ('pos[:, None] * theta', 'pos.clamp(max=29)[:, None] * theta', 'only at places 0, 1, 2, 3'),
        ('-torch.arange(0, hd, 2) / hd', '-torch.arange(hd // 2) / hd', 'exponent -i / hd'),
        ('-torch.arange(0, hd, 2) / hd', '-torch.arange(0, hd, 2) / (hd / 2)', r'hd/2\): hd is'),
        ('-torch.arange(0, hd, 2) / hd', '-2 * torch.arange(0, hd, 2) / hd', 'doubled twice'),
        (ANGLES, f'({ANGLES}).half()', r'^angles\(.*\) holds numbers of type torch.float16'),
        (ANGLES, f'({ANGLES}).long()', 'behind the point is lost'),
        (ANGLES, 'pos[:, None] @ (theta ** (-torch.arange(0, hd, 2) / hd))[None]',
         'of whole numbers'),
        (TURNED, 'torch.cat(a * cos - b * sin, a * sin + b * cos)', 'one tuple or list'),
        (f'return {TURNED}',
         'cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)\n'
         '    return x * cos + torch.cat((-b, a), -1) * sin', 'channels 0 and 1 the same angle'),
        (f'return {TURNED}', 'cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)\n'
         '    a, b = x[..., 0::2], x[..., 1::2]\n'
         '    return x * cos + torch.stack((-b, a), -1).flatten(-2) * sin',
         'has the angles in another order'),
        ('-torch.arange(0, hd, 2) / hd', 'torch.arange(0, hd, 2) / hd', 'should be negative'),
        ('-torch.arange(0, hd, 2) / hd', '-torch.arange(0, hd, 2) / 8', ANY),
        ('a * cos - b * sin, a * sin + b * cos', 'a * cos + b * sin, b * cos - a * sin',
         'turns the wrong way'),
        ('    a, b = x.chunk(2, dim=-1)', '    x = x.unflatten(-1, (-1, 2)).mT.flatten(-2)\n'
         '    a, b = x.chunk(2, dim=-1)', ANY),
        ('a, b = x.chunk(2, dim=-1)', 'a, b = x[..., 0::2], x[..., 1::2]', ANY),
        ('return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)',
         'a, b = x[..., 0::2], x[..., 1::2]\n'
         '    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)',
         'pairs neighbours'),
        ('angles(pos, x.size(-1), theta)', 'angles(torch.arange(len(pos)), x.size(-1), theta)',
         'instead of reading pos'),
        ('angles(pos, x.size(-1), theta)', 'angles(pos, x.size(-1), 10_000.0)', 'theta of its own'),
        ('angles(pos, x.size(-1), theta)', 'angles(pos, 8, theta)', ANY),
        ('a * cos - b * sin, a * sin + b * cos', 'a + cos, b + sin', 'stands at position 0'),
        ('a * sin + b * cos', 'b * cos - a * sin', 'changes the length'),
    ],
    'kv_cache': [
        ('first = self.tokens', 'first = 0', r'counts from 0 in self.pos; new token i .* 5 \+ i'),
        ('torch.arange(first, self.tokens', 'torch.arange(first + x.size(1), self.tokens + '
         'x.size(1)', 'the positions behind the new tokens'),
        ('torch.arange(first, self.tokens', 'torch.arange(first + 1, self.tokens + 1',
         'counts positions from 1'),
        ('torch.arange(first, self.tokens', 'torch.arange(self.tokens', r'shape \(6,\)'),
        ('self.tokens = first + x.size(1)\n        self.pos = torch.arange(first, self.tokens',
         'self.pos = torch.arange(first, first + x.size(1)', 'leaves self.tokens at 0'),
        ('        self.pos = torch.arange(first', '        torch.arange(first', 'self.pos at None'),
        ('self.tokens, device=x.device)', 'self.tokens)', 'self.pos on the CPU'),
        ('            v = torch.cat((self.values[layer], v), dim=2)\n', '', 'only the new values'),
        ('    def update(self, layer, k, v):\n        if layer in self.keys',
         '    def update(self, layer, k, v):\n        layer = 0\n        if layer in self.keys',
         'what layer 0 stored'),
        ('v = torch.cat((self.values[layer], v), dim=2)',
         'v = torch.cat((self.keys[layer], v), dim=2)', 'keys where values should be'),
        ('        if layer in self.keys', '        k, v = v, k\n        if layer in self.keys',
         'values where keys should be'),
        ('torch.cat((self.keys[layer], k), dim=2)', 'torch.cat((k, self.keys[layer]), dim=2)', ANY),
        ('        if layer in self.keys', '        self.tokens += k.size(2)\n'
         '        if layer in self.keys', 'changes self.tokens from 4 to 8'),
        ('.tril(N - S)', '.triu(N - S)', 'lets a new token read itself and later ones'),
        ('.tril(N - S)', '.tril()', r'new token i stands at 4 \+ i'),
        ('.tril(N - S)', '', 'later ones too'),
        ('.tril(N - S)', '.tril(N - S + 1)', 'read the one behind it'),
        ('.tril(N - S)', '.tril(N - S - 1)', 'does not let a new token read itself'),
        ('return torch.ones(S, N', 'return ~torch.ones(S, N', 'is upside down'),
        ('return torch.ones(S, N', 'return None\n    torch.ones(S, N', 'returned None'),
        ('    if S == 1:\n        return None\n', '', 'should be None: a single new token'),
        ('    if S == 1:\n', '    if S == N:\n', r'returned None\. .* single new token'),
        ('torch.ones(S, N', 'torch.ones(S, S', r'shape \(3, 3\)'),
        ('dtype=torch.bool, device=device).tril', 'device=device).tril', 'dtype=torch.bool'),
        ('dtype=torch.bool, device=device).tril', 'dtype=torch.bool).tril', 'mask on the CPU'),
        ('gpt.head(h[:, -1])', 'gpt.lm_head(h[:, -1])', 'padding of the vocabulary'),
        ('gpt.head(h[:, -1])', 'gpt.head(h[:, 0])', 'is each new token the argmax'),
        (BEGIN, '        cache = Cache()\n' + BEGIN, 'they should count on'),
        (BEGIN, BEGIN + BEGIN, 'once in front of each'),
        (BEGIN, '', 'the cache has not heard'),
        (BEGIN, '        if new is prompt:\n    ' + BEGIN, 'gives the trunk 1 embeddings'),
        ('gpt.trunk(x, cache)', 'gpt.trunk(x)', 'without your cache'),
        ('        x = gpt.embed(new)', '        cache, x = Cache(), gpt.embed(out)',
         r'ran \d+ positions through the trunk, and 1\d are enough'),
        ('range(n)', 'range(n - 1)', 'and should have'),
        ('    return out\n', '    return out.float()\n', 'tokens are whole numbers'),
        ('    cache, out, new = Cache(), prompt, prompt\n',
         '    cache, out, new = Cache(), prompt, prompt[:, -1:]\n'
         '    x = gpt.embed(prompt)\n    cache.begin(x)\n    gpt.trunk(x, cache)\n',
         'is a token read twice'),
        ('    cache, out, new = Cache(), prompt, prompt\n',
         '    if len(prompt) > 1:\n'
         '        return torch.cat([generate(gpt, row[None], n) for row in prompt])\n'
         '    cache, out, new = Cache(), prompt, prompt\n', 'with all rows in one pass'),
    ],
    'depth_attention': [
        ('    q = q.reshape(B, nkv', '    (k, v), *sources = sources\n    q = q.reshape(B, nkv',
         'own key and value out'),
        ('    q = q.reshape(B, nkv', '    sources = [*sources, (k, v)]\n    q = q.reshape(B, nkv',
         'own key and value in the softmax twice'),
        ('    q = q.reshape(B, nkv', '    sources = sources[1:]\n    q = q.reshape(B, nkv',
         'leaves layer 0 out'),
        ('(q * keys)', '(0 * q * keys)', 'the same weight'),
        (' / math.sqrt(hd))', ')', 'forgets to divide'),
        ('math.sqrt(hd)', 'math.sqrt(8)', r'divides by sqrt\(8\)'),
        ('math.sqrt(hd)', 'hd', 'not by its square root'),
        ('/ math.sqrt(hd)', '* math.sqrt(hd)', 'multiplies the scores'),
        ('return (a * values).sum(0)', 'return v', 'own value, unmixed'),
        ('return (a * values).sum(0)', 'return (a * keys).sum(0)', 'keys instead of values'),
        ('(q * keys)', '(k * keys)', 'by its key'),
        ('.softmax(0)', '.softmax(1)', 'do not sum to 1 over the layers'),
        ('B, nkv, -1, T, hd).mean(2)', 'B, nkv, -1, T, hd).sum(2)', 'should be averaged'),
        ('B, nkv, -1, T, hd).mean(2)', 'B, -1, nkv, T, hd).mean(1)', 'neighbours belong together'),
        ('B, nkv, -1, T, hd).mean(2)', 'B, nkv, -1, T, hd)[:, :, 0]', 'takes one query of each'),
        ('q.reshape(B, nkv, -1, T, hd).mean(2)', 'q[:, :nkv]', 'takes the first queries'),
        ('    q = q.reshape(B, nkv', '    if q.size(1) > nkv:\n'
         '        groups = q.unflatten(1, (nkv, -1)).unbind(2)\n'
         '        return sum(mix(q, k, v, sources) for q in groups) / len(groups)\n'
         '    q = q.reshape(B, nkv', 'averages the weights'),
        ('return (a * values).sum(0)', 'return (a * values.detach()).sum(0)', 'gradient'),
        ('mix(q, k, v, anchors)', 'mix(q, k, v, anchors[-1:])', 'only the newest'),
        ('mix(q, k, v, anchors)', 'mix(q, k, v, anchors[:1])', 'reads only layer 0'),
        ('anchors + [(k, mixed[-1])]', 'anchors + [(k, v)]', 'mixes raw values'),
        ('anchors + [(k, mixed[-1])]', 'anchors + [(mixed[-1], k)]', 'the key first'),
        ('if layer % stride == 0', 'if True', 'reads all layers below'),
        ('mixed.append(mix(q, k, v, anchors))', 'mixed.append(mix(q, k, v, [(layers[j][1], '
         'mixed[j]) for j in range(layer % stride, layer, stride)]))', 'the anchors are fixed'),
        ('if layer % stride == 0', 'if layer % 2 == 0', ANY),
        ('mix(q, k, v, anchors)', 'mix(q, k, v, anchors + [(k, v)] * (layer % stride == 0))',
         'a source of itself'),
        ('    keys = torch.stack(', '    _, _ = zip(*sources)\n    keys = torch.stack(',
         'Layer 0 has no sources'),
        ('    return mixed\n', '    return mixed[1:]\n', 'one v~ for each of the 6 layers'),
    ],
    'pondering': [
        ('range(steps)', 'range(steps - 1)', 'one pass too few'),
        ('range(steps)', 'range(steps + 1)', 'one pass too many'),
        ('range(steps)', 'range(gpt.config.ponder_steps)', 'reads gpt.config.ponder_steps'),
        ('x = x + p @', 'x = p @', 'replaces the input'),
        ('x = x + p @', 'x = gpt.embed(idx) + p @', 'join the running sum'),
        ('(gpt.wte.weight * gpt.config.embed_scale)', 'gpt.wte.weight', 'without its scale'),
        ('gpt.config.embed_scale)', '4.0)', ANY),
        ('gpt.config.embed_scale)', 'gpt.config.embed_scale ** 2)', 'scales the mean .* twice'),
        ('    x = gpt.embed(idx)', '    x = gpt.wte(idx)', r'begins with gpt.wte\(idx\)'),
        ('    return gpt.trunk(x)\n', '    return x\n', 'returns E_K itself'),
        ('gpt.wte.weight', 'gpt.lm_head.weight', 'rows of the head'),
        ('x = x + p @ (', 'p = p.eq(p.amax(-1, True)).to(p.dtype)\n        x = x + p @ (',
         'takes the likeliest token'),
        ('(x)).softmax(-1) ', '(x)) ', 'the softmax is missing'),
        ('(x)).softmax(-1) ', '(x)).softmax(1) ', 'softmax over the positions'),
        ('gpt.head(gpt.trunk', 'gpt.lm_head(gpt.trunk', 'padded rows'),
        ('x = x + p @ (gpt.wte.weight * gpt.config.embed_scale)', 'x = x + gpt.trunk(x)',
         'feeds back the hidden state'),
        (MIXED, 'x + F.pad((p @ (gpt.wte.weight * gpt.config.embed_scale))[:, :-1], (0, 0, 1, 0))',
         'gives the mean to the next position'),
        (MIXED, '(x + p @ gpt.wte.weight) * gpt.config.embed_scale', 'scales the sum'),
        ('x = x + p @ (gpt.wte.weight * gpt.config.embed_scale)',
         'x = (x + p @ (gpt.wte.weight * gpt.config.embed_scale)) / 2', 'should add them'),
        (MIXED,
         'x + (p @ (gpt.wte.weight * gpt.config.embed_scale)).roll(-1, 1)', 'sees the future'),
        (MIXED, 'gpt.trunk(x) + p @ (gpt.wte.weight * gpt.config.embed_scale)',
         'adds the mean embedding to the hidden state'),
        (MIXED, 'x + gpt.wte(p)', 'looks up tokens'),
        ('gpt.wte.weight * gpt.config.embed_scale', 'gpt.wte.weight.mul_(gpt.config.embed_scale)',
         'Backward needs what was overwritten'),
        ('    return gpt.trunk(x)\n', '    return gpt.trunk(x).half()\n', 'type torch.float16'),
        ('x = x + p', 'x += p', 'Backward needs what was overwritten'),
        ('(x)).softmax(-1)', '(x)).detach().softmax(-1)', 'gradient is lost'),
        ('    return gpt.trunk(x)\n', '    return gpt.trunk(x).detach()\n',
         'no gradient can flow'),
        ('    return gpt.trunk(x)\n', '    return gpt.head(gpt.trunk(x))\n',
         r'shape \(2, \d+, 40\)'),
        ('    x = gpt.embed(idx)\n', '    return gpt.hidden(idx)\n',
         r'hidden\(\) is what you are to write yourself'),
    ],
    'jacobi': [
        ('    slots, results = [], []\n', '    return jacobi(gpt, x, x.size(1))\n', 'calls jacobi'),
        ('torch.arange(len(slots)) // 2', 'torch.arange(len(slots))', 'position of its own'),
        ('    slots, results = [], []\n', '    return gpt.trunk(x)\n',
         'without any thought'),
        ('    slots, results = [], []\n',
         '    z = gpt.trunk(x)\n'
         '    for _ in range(9):\n'
         '        h = read(gpt, torch.cat((x, z), 1), torch.arange(x.size(1)).repeat(2))\n'
         '        z = h[:, :x.size(1)]\n'
         '    return h[:, x.size(1):]\n', 'all tokens first and then all thoughts'),
        ('results.append(last_output(gpt, slots))', 'results.append(slots[-1])',
         'sequential.. returns the outputs at the token slots'),
        ('slots.append(last_output(gpt, slots))', 'slots.append(gpt.trunk(x[:, :t + 1])[:, -1])',
         'right at position 0 and wrong at 1'),
        ('z = h[:, 0::2]', 'z = h[:, 1::2]', "thoughts' slots back"),
        ('z = h[:, 0::2]', 'x, z = h[:, 0::2], h[:, 1::2]', 'puts outputs into all slots'),
        ('z = h[:, 0::2]', 'z = z + h[:, 0::2]', 'adds the new thoughts to the old ones'),
        ('return h[:, 1::2]', 'return h[:, 0::2]', 'jacobi.. .* outputs at the token slots'),
        ('pos.repeat_interleave(2)', 'torch.arange(2 * len(pos))', 'jacobi.. .* of its own'),
        ('read(gpt, slots, pos.repeat_interleave(2))', 'gpt.trunk(slots)',
         'jacobi.. .* of its own'),
        ('read(gpt, torch.stack(slots, dim=1), pos)', 'gpt.trunk(torch.stack(slots, dim=1))',
         'sequential.. .* of its own'),
        ('torch.stack((x, z), dim=2).flatten(1, 2)', 'torch.cat((x, z), dim=1)', ANY),
        ('torch.stack((x, z), dim=2)', 'torch.stack((z, x), dim=2)', 'in front of its token'),
        ('pos.repeat_interleave(2)', 'pos.repeat(2)', 't, so 0 0 1 1'),
        ('return h[:, 1::2]', 'return out', 'is not defined'),
        ('    return h[:, 1::2]', '    for _ in range(iterations):\n        out = h[:, 1::2]\n'
         '    return out', 'set it before'),
        ('range(iterations + 1)', 'range(max(iterations, 1))', 'one iteration less'),
        ('range(iterations + 1)', 'range(iterations + 2)', 'one iteration more'),
        ('range(iterations + 1)', 'range(20)', 'is the exact result'),
        ('    z = gpt.trunk(x)', '    z = 0 * x', r'passes of \[10\] .* for are \[5, 10\]'),
        ('        z = h[:, 0::2]', '        z = h[:, 0::2].detach()', 'gradient is lost'),
        ('    z = gpt.trunk(x)', '    x = x.detach()\n    z = gpt.trunk(x)', 'gradient is lost'),
        ('return T - 1', 'return T', 'more than it takes'),
        ('return T - 1', 'return min(T - 1, 3)', 'is not exact yet, after them it is still off by'),
        ('return T - 1', 'return T - 1.0', 'should be a whole number'),
    ],
    'halting': [
        ('if self.before is not None', 'if False', 'all keys anew'),
        ('torch.where(m, v', 'torch.where(~m, v', 'wrong way round'),
        ('self.before.keys[layer])\n', 'self.before.keys[0])\n', 'of another layer'),
        ('        self.keys[layer], self.values[layer] = k, v\n', '        return k\n',
         'two tensors'),
        ('self.keys[layer], self.values[layer] = k, v', 'pass', 'should hold them too'),
        ('            k = torch.where(m, k, self.before.keys[layer])\n',
         '            k = torch.where(m, k, self.before.keys[layer])\n'
         '            self.before.keys[layer].copy_(k)\n', 'writes into self.before'),
        ('(s >= tau)', '(s >= 0.5)', 'tau is an argument'),
        ('(s >= tau)', '(s > tau)', 'nobody halts while s >= tau'),
        ('m = m & (s >= tau)', 'm = s >= tau', 'never wakes up again'),
        ('m = m & (s >= tau)', 'm = m and (s >= tau)', 'write &, | and ~'),
        ('m & (s >= tau)', 'm & s >= tau', 'a comparison needs brackets'),
        ('Frozen(x.size(1), m, memory)', 'Frozen(x.size(1), m, memory.before or memory)',
         'each Frozen gets the Frozen of the pass before'),
        ('(m * s)[..., None]', 'm[..., None]', 'the gate should scale it'),
        ('gate(h).sigmoid()', 'gate(h)', 'the sigmoid of it is s'),
        ('passes = m.long()', 'passes = 0 * m.long()', 'the first one included'),
        ('passes = passes + m', 'passes = passes + m.float()', 'and not in torch.float32'),
        ('readout = torch.where(m[..., None], h, readout)', 'readout = h', 'moves on after'),
        ('torch.where(m[..., None], h, readout)',
         'torch.where((m if gate is gates[-1] else m & (gates[gates.index(gate) + 1](h).sigmoid()'
         '.squeeze(-1) >= tau))[..., None], h, readout)', 'readout with the m after the gate'),
        ('readout = h = gpt.trunk(x, memory)', 'h = gpt.trunk(x, memory)\n'
         '    readout = 0 * h', 'in the first one all are active'),
        ('Frozen(x.size(1), m, memory)', 'Frozen(x.size(1))',
         'should read the frozen keys and values'),
        ('gate(h).sigmoid()', 'gate(h).detach().sigmoid()', 'gradient is lost'),
        ('for gate in gates:', 'for gate in gates[:3]:', ANY),
        ('    for gate in gates:', '    start = x\n    for gate in gates:\n        x = start',
         'join the running sum'),
        ('x = x + (m * s)', 'x = (m * s)', 'replaces the input'),
        ('        h = gpt.trunk(x, memory)\n' + READS, READS + '        h = gpt.trunk(x, memory)\n',
         'never takes the readout of the last pass'),
    ],
    'flops': [
        ('3 * c.n_embd * c.mlp_hidden', '2 * c.n_embd * c.mlp_hidden', 'two matrices'),
        ('2 * T * width)', 'T * width)', 'counts half of attention'),
        ('2 * T * width)', '0)', 'leaves out attention itself'),
        ('2 * T * width)', '2 * T * kv_width)', 'n_kv_head heads in attention too'),
        ('2 * T * width)', '2 * T * c.n_embd)', 'all heads in attention; it is n_head'),
        ('(width + 2 * kv_width) + width * c.n_embd', '(c.n_embd + 2 * kv_width) + c.n_embd ** 2',
         'the width of all heads; it is n_head'),
        ('width, kv_width = c.n_head * c.head_dim', 'width, kv_width = c.n_embd',
         'all heads, in attention too'),
        ('(width + 2 * kv_width)', '3 * width', 'as many heads as the queries have'),
        ('(width + 2 * kv_width)', '(width + kv_width)', 'leaves out the queries, or the keys'),
        ('c.n_embd * c.vocab_size', 'c.n_embd * c.n_tokens', ANY),
        ('return trunk + head\n', 'return trunk\n', 'leaves out the head'),
        ('return trunk + head\n', 'return trunk + c.n_layer * head\n', 'head in every layer'),
        ('return trunk + head\n', 'return trunk + 2 * head\n', 'it is a look-up'),
        ('return trunk + head\n', 'return 3 * (trunk + head)\n', 'is for training'),
        ('return trunk + head\n', 'return T * (trunk + head)\n', 'asked for is the cost of one'),
        ('return trunk + head\n', 'return trunk / c.n_layer + head\n', 'counts one layer'),
        ('return trunk + head\n', 'return (trunk + head) / 2\n', 'half of what it should be'),
        (PONDER, 'K * (trunk + head) + K * head', 'should be forward_flops|forgets that K steps'),
        (PONDER, '(K + 1) * (trunk + head) + (K + 1) * head', 'mixture after the last pass'),
        (PONDER, '(K + 1) * (trunk + head)', 'and then a mixture'),
        (PONDER, '(K + 1) * trunk + 2 * K * head', 'counts K heads'),
        (PONDER, '(K + 1) * trunk + head', 'leaves out heads and mixtures'),
        (PONDER, 'trunk + (2 * K + 1) * head', 'trunk only once'),
        (PONDER, '(K + 1) * (2 * c.n_layer * (4 * c.n_embd ** 2 + 3 * c.n_embd * c.mlp_hidden'
         ' + 2 * T * c.n_embd) + head) + K * head', 'ponder_flops.* grouped queries, should be'),
        (PONDER, '(K + 1) * (trunk + head - 2 * c.n_layer * 2 * (T + c.n_embd)'
         ' * (c.n_head * c.head_dim - c.n_embd)) + K * head', 'ponder_flops.*, in attention too'),
        (PONDER, '(K + (K < 2)) * trunk + (2 * K + 1) * head', 'counts the trunk K times'),
        (FAIR, '3 * tokens * ponder_flops(c, T) / forward_flops(c, T)', 'forward pass alone'),
        (FAIR, 'tokens * forward_flops(c, T) / ponder_flops(c, T)', 'upside down'),
        (FAIR, 'tokens', 'what about the work'),
        (FAIR, '(c.ponder_steps + 1) * tokens', 'counts passes only'),
        (FAIR, '3 * tokens * ponder_flops(c, T)', 'asked for are tokens'),
        (FAIR, 'tokens * ponder_flops(type(c)(**{**vars(c), "ponder_steps": 3}), T)'
         ' / forward_flops(c, T)', 'counts 3 steps'),
    ],
}

UNUSUAL = {  # exercise: what is written
    'attention': '''
def attention(q, k, v):
    """Groups as an axis of their own, and the mask by comparison."""
    B, nh, T, hd = q.shape
    q = q.view(B, k.size(1), -1, T, hd) * hd ** -0.5
    scores = torch.einsum('bngtd,bnud->bngtu', q, k)
    t = torch.arange(T, device=q.device)
    scores = scores.where(t[:, None] >= t, torch.finfo(q.dtype).min)
    return torch.einsum('bngtu,bnud->bngtd', scores.softmax(-1), v).reshape(B, nh, T, hd)
''',
    'rope': '''
def angles(pos, hd, theta):
    return torch.stack([pos / theta ** (2 * i / hd) for i in range(hd // 2)], dim=1)


def rotate(x, pos, theta):
    """Complex numbers."""
    a, b = x.chunk(2, -1)
    angle = angles(pos, x.size(-1), theta)[:, None]
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)
''',
    'kv_cache': '''
class Cache:
    """One tensor for keys and values; positions by addition."""
    keys_per_slot = 1

    def __init__(self):
        self.both, self.tokens = {}, 0

    def begin(self, x):
        one_each = torch.ones_like(x[0, :, 0], dtype=torch.long)
        self.pos = self.tokens - 1 + one_each.cumsum(0)
        self.tokens += len(self.pos)

    def update(self, layer, k, v):
        new = torch.stack((k, v))
        if layer in self.both:
            new = torch.cat((self.both[layer], new), dim=-2)
        self.both[layer] = new
        return list(new)


def mask(S, N, device):
    """With an axis for rows and heads."""
    reads = ~torch.ones(S, N, device=device).triu(N - S + 1).bool()[None, None]
    return reads if S > 1 else None


def generate(gpt, prompt, n):
    if n == 0:
        return prompt
    return torch.cat((prompt, *more(gpt, Cache(), prompt, n)), 1)


def more(gpt, cache, new, n):
    x = gpt.embed(new)
    cache.begin(x)
    token = gpt.head(gpt.trunk(x, cache)[:, -1:]).argmax(-1)
    return [token, *more(gpt, cache, token, n - 1)] if n > 1 else [token]
''',
    'depth_attention': '''
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
''',
    'pondering': '''
def ponder(gpt, idx, steps):
    """The used rows of the table only, and the first pass in front of the loop."""
    n = gpt.config.n_tokens
    E = [gpt.wte(idx) * gpt.config.embed_scale]
    h = gpt.trunk(E[0])
    while len(E) <= steps:
        P = (gpt.lm_head(h)[..., :n]).log_softmax(-1).exp()
        W = gpt.wte.weight[:n] * gpt.config.embed_scale
        E.append(E[-1] + torch.einsum('btv,vc->btc', P, W))
        h = gpt.trunk(E[-1])
    return h
''',
    'jacobi': '''
def sequential(gpt, x):
    """Over all slots each time; those still unknown are zeros, which nobody before them sees."""
    T = x.size(1)
    slots = torch.zeros(x.size(0), 2 * T, x.size(2))
    slots[:, 0::2] = x
    for t in range(T):
        slots[:, 2 * t + 1] = read(gpt, slots, torch.arange(2 * T) // 2)[:, 2 * t]
    return read(gpt, slots, torch.arange(2 * T) // 2)[:, 1::2]


def jacobi(gpt, x, iterations):
    T = x.size(1)
    z = gpt.trunk(x)
    for i in range(iterations + 1):
        pairs = [part for t in range(T) for part in (x[:, t], z[:, t])]
        h = read(gpt, torch.stack(pairs, 1), torch.arange(T).repeat_interleave(2))
        z = h.view(x.size(0), T, 2, -1)[:, :, 0]
    return h.view(x.size(0), T, 2, -1)[:, :, 1]


def iterations_needed(T):
    return len(range(1, T))
''',
    'halting': '''
class Frozen:
    """Arithmetic in the place of where."""

    keys_per_slot = 1

    def __init__(self, T, active=None, before=None):
        self.pos, self.keys, self.values = torch.arange(T), {}, {}
        self.active, self.before = active, before

    def update(self, layer, k, v):
        if self.before:
            m = self.active[:, None, :, None].to(k.dtype)
            k = m * k + (1 - m) * self.before.keys[layer]
            v = m * v + (1 - m) * self.before.values[layer]
        self.keys[layer] = k
        self.values[layer] = v
        return [k, v]


def think(gpt, gates, x, tau):
    """A last gate that is always shut; E of halted tokens moves on, which nobody reads."""
    m = torch.ones(x.shape[:2], dtype=torch.bool)
    readout, passes, memory = torch.zeros_like(x), torch.zeros_like(m, dtype=torch.long), None
    for i in range(len(gates) + 1):
        memory = Frozen(x.size(1), m, memory)
        h = gpt.trunk(x, memory)
        readout = h * m[..., None] + readout * ~m[..., None]
        passes = passes + m
        if i < len(gates):
            g = torch.sigmoid(gates[i](h))
            m = m & (g[..., 0] >= tau)
            x = x + g * Embedding.mixture(gpt, h)
    return readout, passes
''',
    'flops': '''
def forward_flops(c, T, steps=0):
    C, V, hd = c.n_embd, c.vocab_size, c.head_dim
    a = C * hd * (c.n_head + c.n_kv_head + c.n_kv_head) + c.n_head * hd * C
    b = 2 * sum(T * hd for _ in range(c.n_head))
    d = C * 2 * c.mlp_hidden + c.mlp_hidden * C
    return 2 * ((steps + 1) * (c.n_layer * (a + b + d) + C * V) + steps * V * C)


def ponder_flops(c, T):
    return forward_flops(c, T, steps=c.ponder_steps)


def fair_tokens(c, T, tokens):
    return tokens + tokens * (ponder_flops(c, T) - forward_flops(c, T)) / forward_flops(c, T)
''',
}
