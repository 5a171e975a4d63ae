"""
Lab: four other ways to mix over depth, beside Depth-Attention.

    python exercises/labs/across_layers.py
        each of them on text, three seeds, 15 minutes: --help lists the settings
    python exercises/labs/across_layers.py --names=plain,denseformer --seeds=1 --steps=100

A plain GPT adds what each branch makes to one stream, and the next branch reads the sum. All of
these read something else. X_0 is the embedding, X_i what block i makes; one token at a time, so
that caches stay as they are:

    DenseFormer (arXiv 2402.02622)
        Y_i = sum_{j <= i} a_ij X_j             block i + 1 reads Y_i; a_ii begins at 1, others 0
    Attention Residuals (arXiv 2603.15031), whose "layer" is a branch, attention or MLP
        b_0 = X_0, b_n = what the branches of block n made, added up; no stream besides
        a branch reads sum_s softmax_s(w . RMSNorm(s)) s over b_0 .. b_{n-1} and, behind the first
        branch of block n, what it has made so far, and so does the head; w, one for each reader but
        the first, begins at 0
    the same name in the code of Depth-Attention's authors is another function, `attnres_biased`
        s: X_0, the stream after every 6th layer, and the stream itself, whose score has a bias that
        begins at 3; what a branch makes is added to the stream, which is never reset
    mHC (arXiv 2512.24880): n = 4 streams H_i, all X_0 at first. For each branch
        z = W RMSNorm(H_1 .. H_n)                   (2 n + n^2) numbers
        h_pre = sigmoid(a z + b), h_post = 2 sigmoid(a z + b), h_res = Sinkhorn(a z + b)
        the branch reads sum_i h_pre,i H_i and makes y;    H_i <- sum_j h_res,ij H_j + h_post,i y
        the head reads sum_i softmax_i(o) H_i; o begins at 0
        a begins at 0.01; b so that the read is the mean, the write 1, the mixing nearly none

Sinkhorn makes rows and columns sum to 1. DenseFormer at its start is the plain model, and so is mHC
with a = 0: their streams stay equal. Attention Residuals with one block and w = 0 read a multiple
of the plain stream, which the norm in front of a branch takes away.

The table: nats per byte of validation text after --steps steps of tools/compare.py's recipe for
text, mean and spread of the seeds; the time of a step over the plain model's; what a step keeps for
backward, over the plain model's; weights that it adds.

One thread of an AMD EPYC, 2026-11-25; step times of seed 1; in brackets the lowest to highest of
seeds 1337, 1 and 2:

    way             nats per byte                minus plain  step time  kept  weights
    plain                  1.8621                                  1.00  1.00        0
    depth_attn             1.8348  -0.027 (-0.071 to +0.015)       1.05  1.03        0
    depth_uniform          1.7715  -0.091 (-0.106 to -0.069)       1.00  1.03        0
    denseformer            1.8517  -0.010 (-0.015 to -0.004)       1.04  1.04       14
    attnres                1.8164  -0.046 (-0.047 to -0.045)       1.23  1.80    2,048
    attnres_biased         1.8108  -0.051 (-0.076 to -0.031)       1.13  1.45    2,056
    mhc                    1.8497  -0.013 (-0.018 to -0.003)       2.33  2.55  102,620

In the mean both Attention Residuals are ahead of Depth-Attention here, and a plain average of the
values is ahead of all. With four layers and 600 steps, `attnres_biased` never takes a snapshot; and
four layers are few to choose from, where the papers have dozens.

Ten times the text (--steps=6000; on a busy AMD EPYC 7 to 9 minutes a run, of mHC 14 to 17;
2026-11-28), seeds 1, 2 and 1337; the first three are docs/claims.md's runs of the same recipe:

    way            nats per byte             minus plain
    plain          1.2821  1.3003  1.2995
    depth_attn     1.2706  1.2785  1.2894    -0.014 (-0.022 to -0.010)
    depth_uniform  1.2892  1.2830  1.2647    -0.015 (-0.035 to +0.007)
    denseformer    1.2796  1.2988  1.2975    -0.002 (-0.003 to -0.001)
    attnres        1.2842  1.2956  1.2995    -0.001 (-0.005 to +0.002)
    mhc            1.2841  1.2830  1.2862    -0.010 (-0.017 to +0.002)

Now Depth-Attention is ahead of DenseFormer and of Attention Residuals in every seed, and level with
mHC. `attnres_biased` was not run.
"""
import math
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import common
import prepare_data
from configurator import check_range
from engine.cpu import tune_cpu
from engine.files import UserError, run, table
from engine.shards import read_meta
from engine.start import vocabulary_of
from engine.windows import Windows
from model import GPT, GPTConfig, Memory, RMSNorm, rope_table
from train import Settings, learning_rate, make_optimizer


@dataclass
class LayersSettings:
    """what is trained; the recipe is docs/results.md's for text"""
    names: str = 'all'      # which, with commas between (all: every one)
    seeds: str = '1337,1,2' # of weights and data
    steps: int = 600        # of 4 windows of 128 bytes
    n_layer: int = 4        # layers of width 128

    def __post_init__(self):
        check_range(self, 1, math.inf, 'steps', 'n_layer')


# ---- the ways to mix -----------------------------------------------------------------------------

class OtherTrunk(GPT):
    """A GPT whose trunk is another: `mix` takes the place of the loop over the blocks."""

    def trunk(self, x, memory=None, norm=True):
        if memory is None:
            memory = Memory()
            memory.begin(x)
        rope = rope_table(memory.pos, self.config.head_dim, self.config.rope_theta, x.dtype)
        self.read = rope, memory        # what a block asks for
        return self.ln_f(self.mix(x))

    def branches(self):
        """Both branches of each block in turn, (B,S,C) -> what it adds: [(norm, function), ..]."""
        found = []
        for block in self.h:
            found.append((block.ln_1, lambda h, attn=block.attn: attn(h, *self.read)))
            found.append((block.ln_2, block.mlp))
        return found


class DenseFormer(OtherTrunk):

    def __init__(self, config):
        super().__init__(config)
        self.a = nn.ParameterList()
        for i in range(1, config.n_layer + 1):
            self.a.append(nn.Parameter(F.one_hot(torch.tensor(i), i + 1).float()))

    def mix(self, x):
        made = [x]                                                      # X_0 .. X_i
        for block, a in zip(self.h, self.a):
            made.append(block(x, *self.read))
            x = sum(a_j * X_j for a_j, X_j in zip(a, made))             # Y_i
        return x


class AttentionResiduals(OtherTrunk):
    layers_per_block = 1

    def __init__(self, config):
        super().__init__(config)
        reads = 2 * config.n_layer          # of each branch but the first, and for the head
        self.w = nn.ParameterList(nn.Parameter(torch.zeros(config.n_embd)) for _ in range(reads))
        self.norms = nn.ModuleList(RMSNorm(config.n_embd, config.norm_eps) for _ in range(reads))

    def look(self, i, sources):
        """What read number i makes of sources (B,S,C) each; number 0 has only the embedding."""
        if i == 0:
            return sources[0]
        values = torch.stack(sources)                                   # (n,B,S,C)
        p = self.scores(i - 1, values).softmax(0)                       # (n,B,S)
        return (p[..., None] * values).sum(0)

    def scores(self, i, values):
        return self.norms[i](values) @ self.w[i]

    def mix(self, x):
        blocks, made = [x], None                                        # b_0 .., and of this block
        for i, (norm, branch) in enumerate(self.branches()):
            if i > 0 and i % (2 * self.layers_per_block) == 0:
                blocks, made = [*blocks, made], None
            y = branch(norm(self.look(i, blocks if made is None else [*blocks, made])))
            made = y if made is None else made + y
        return self.look(i + 1, [*blocks, made])


class BiasedResiduals(AttentionResiduals):
    """As in the code of Depth-Attention's authors."""
    layers_per_block = 6

    def __init__(self, config):
        super().__init__(config)
        self.bias = nn.Parameter(torch.full((len(self.w),), 3.0))

    def scores(self, i, values):
        scores = super().scores(i, values)
        return torch.cat((scores[:-1], scores[-1:] + self.bias[i]))     # the stream is the last

    def mix(self, x):
        kept, stream = [x], x
        for i, (norm, branch) in enumerate(self.branches()):
            stream = stream + branch(norm(self.look(i, [*kept, stream])))
            if (i + 1) % (2 * self.layers_per_block) == 0:
                kept.append(stream)
        return self.look(i + 1, [*kept, stream])


class HyperConnections(OtherTrunk):
    n = 4

    def __init__(self, config):
        super().__init__(config)
        self.maps = nn.ModuleList(Maps(config, self.n) for _ in range(2 * config.n_layer))
        self.out = nn.Parameter(torch.zeros(self.n))

    def mix(self, x):
        H = x[..., None, :].expand(*x.shape[:-1], self.n, -1)           # (B,S,n,C)
        for maps, (norm, branch) in zip(self.maps, self.branches()):
            pre, post, res = maps(H)
            y = branch(norm((pre[..., None] * H).sum(-2)))              # (B,S,C)
            H = res @ H + post[..., None] * y[..., None, :]
        return (self.out.softmax(-1)[:, None] * H).sum(-2)


class Maps(nn.Module):
    """h_pre (..,n), h_post (..,n), h_res (..,n,n) of streams H (..,n,C)."""

    def __init__(self, config, n):
        super().__init__()
        self.n = n
        self.norm = RMSNorm(n * config.n_embd, config.norm_eps)
        self.W = nn.Parameter(torch.randn(n * config.n_embd, 2 * n + n * n) * config.init_std)
        self.a = nn.Parameter(torch.full((3,), 0.01))                   # of pre, post, res
        nearly_none = torch.full((n, n), 0.01 / (n - 1)).fill_diagonal_(0.99)
        self.b_pre = nn.Parameter(torch.full((n,), math.log(1 / (n - 1))))      # sigmoid: 1 / n
        self.b_post = nn.Parameter(torch.zeros(n))
        self.b_res = nn.Parameter(nearly_none.log())

    def forward(self, H):
        z = self.norm(H.flatten(-2)) @ self.W
        pre, post, res = z.split((self.n, self.n, self.n ** 2), -1)
        pre = torch.sigmoid(self.a[0] * pre + self.b_pre)
        post = 2 * torch.sigmoid(self.a[1] * post + self.b_post)
        res = sinkhorn(self.a[2] * res.unflatten(-1, (self.n, self.n)) + self.b_res)
        return pre, post, res


def sinkhorn(scores, rounds=20):
    """Positive matrices (..,n,n) whose rows and columns sum to 1, from any numbers."""
    m = (scores - scores.amax((-2, -1), keepdim=True)).exp().clamp(min=1e-12)
    for _ in range(rounds):
        m = m / m.sum(-1, keepdim=True)
        m = m / m.sum(-2, keepdim=True)
    return m


# name: class, and settings of the model
WAYS = {
    'plain': (GPT, {}),
    'depth_attn': (GPT, dict(depth_attn=True)),
    'depth_uniform': (GPT, dict(depth_attn=True, depth_mode='uniform')),
    'denseformer': (DenseFormer, {}),
    'attnres': (AttentionResiduals, {}),
    'attnres_biased': (BiasedResiduals, {}),
    'mhc': (HyperConnections, {}),
}


# ---- the comparison ------------------------------------------------------------------------------

@dataclass
class Trained:
    """Of one run."""
    nats: float         # of validation text, per byte
    seconds: float      # of a step
    kept: int           # bytes that a step keeps for backward
    weights: int


def trained(name, seed, settings, data):
    """Train one way with one seed, as train.py would: a Trained."""
    kind, own = WAYS[name]
    s = Settings(max_steps=settings.steps, learning_rate=3e-3, batch_tokens=512, micro_batch=4)
    shape = dict(n_layer=settings.n_layer, n_embd=128, n_head=2, mlp_hidden=352, block_size=128)
    cpu = torch.device('cpu')
    torch.manual_seed(seed)
    model = kind(GPTConfig(**shape, **vocabulary_of(data['meta']['n_tokens']), **own)).train()
    optimizer = make_optimizer(s, model, cpu)
    times = []
    for step in range(s.max_steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group['lr'] = learning_rate(s, step)
        x, y = data['train'].sample(4 * step, 4, seed, cpu)
        model(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    weights = sum(p.numel() for p in model.parameters())
    return Trained(validation(model, data['val']), statistics.median(times), kept(model, x, y),
                   weights)


@torch.no_grad()
def validation(model, data, windows=512):
    """Mean nats per byte over so many windows, spread over the validation text as in train.py."""
    model.eval()
    spread = data.spread(windows)
    total = 0.0
    for i in range(0, len(spread), 4):
        some = spread[i:i + 4]
        total += model(*data.get(some, torch.device('cpu')))[1].item() * len(some)
    return total / len(spread)


def kept(model, x, y):
    """Bytes that a forward pass keeps for backward, each storage once, without the weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.train()(x, y)[1]
    del loss
    return sum(found.values())


def main(argv):
    settings, _ = common.start(argv, __doc__, LayersSettings, folders=0)
    names = list(WAYS) if settings.names == 'all' else settings.names.split(',')
    unknown = [name for name in names if name not in WAYS]
    seeds = settings.seeds.split(',')
    if unknown or not all(seed.isdecimal() and int(seed) < 2 ** 31 for seed in seeds):
        raise UserError(f"--names={settings.names} --seeds={settings.seeds}: names are "
                        f"{', '.join(WAYS)}, seeds whole numbers below 2^31")
    tune_cpu()
    prepare_data.prepare_builtin('data/python')
    meta = read_meta('data/python')
    if meta['tokenizer'] != 'byte':
        raise UserError(f"data/python has tokens of {meta['tokenizer']}, and this lab counts nats "
                        "per byte: move the folder away")
    data = {'meta': meta, **{part: Windows('data/python', part, meta, 128)
                             for part in ('train', 'val')}}
    runs = {name: [] for name in names}
    for seed in map(int, seeds):
        for name in names:
            runs[name].append(trained(name, seed, settings, data))
            print(f"{name}, seed {seed}: {runs[name][-1].nats:.4f} nats per byte", file=sys.stderr)

    base = runs[names[0]]
    rows = []
    for name, found in runs.items():
        nats = [one.nats for one in found]
        gain = [one.nats - other.nats for one, other in zip(found, base)]
        slower = [one.seconds / other.seconds for one, other in zip(found, base)]
        rows.append([name, f'{statistics.mean(nats):.4f}',
                     f'{statistics.mean(gain):+.4f} ({min(gain):+.4f} to {max(gain):+.4f})',
                     f'{statistics.median(slower):.2f}', f'{found[0].kept / base[0].kept:.2f}',
                     f'{found[0].weights - base[0].weights:,}'])
    print(table(['way', 'nats per byte', f'minus {names[0]}', 'step time', 'kept', 'weights'],
                rows))


if __name__ == '__main__':
    run(main)
