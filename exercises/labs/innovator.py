"""
Lab: a dense checkpoint becomes a mixture of experts, so that it learns new domains and keeps the old one.

    python exercises/labs/innovator.py out/vanilla             some minutes on a CPU
    python exercises/labs/innovator.py out/vanilla --seed=2    other draws, another router; --help lists the settings

Innovator (arXiv 2507.18671): training a dense model further on science makes it forget. So its FFNs become experts, while it
trains: a shared one, for what the model could do before, and many small ones, for the new domains, of which a router picks K.

    stage 1, induction   for each new domain j, a copy of the model is trained on it:          FFN_j
    stage 2, splitting   FFN_j is cut along its hidden width f into G shards of width f / G:   E_{j,1} .. E_{j,G}
                         E_{j,i}(x) = Wdown_j[:, i] (silu(Wgate_j[i] x) * (Wup_j[i] x)),       sum_i E_{j,i}(x) = FFN_j(x)
    stage 3, routing     r = W x, one number for each of the N shards; gates g = K softmax over the K = G largest
                         y = FFN(x) + a sum_{e in top K} g_e E_e(x);  only W and a learn, on a mix of all domains
    stage 4, joint       everything learns, on such a mix
    from stage 3 on      loss += alpha sum over layers of sum_e f_e P_e, with f_e = N / (K n) times how often n tokens chose
                         shard e, and P_e the mean over them of softmax(r)_e: 1 for even loads, N / K if K always win

The sum of shards is not weighted, so gates that sum to 1 would shrink it by G: hence the factor K. The scalar `a` of each layer
starts at 0, where the mixture is the dense model, bit for bit, whatever the specialists learned. There the router has no
gradient, so stage 3 opens it to 0.5. A router that starts with one row for each domain, repeated for its G shards, picks
whole FFN_j; the rows part in training. Here N = 2 G: the domains are C++ (PyTorch's headers) and lists of Unicode's character
names, both on every machine. The checkpoint's own text plays the part of general knowledge.

The table has losses in nats per token on each domain; parameters, and those that a token uses ("active"); FLOPs of a token in
use, and of all training so far, both counted by PyTorch as it runs. Two dense models are what all this competes with: one trained
on the very rows that the mixture saw, in another order, one on as many rows of the new domains alone. Measured with a checkpoint
of 0.9M parameters (tools/compare.py's `plain`), on two cores of an Intel Xeon at 2.5 GHz, 2026-11-21, one seed:

                             own text     C++  Unicode  parameters  active  FLOPs/token  training FLOPs
    the checkpoint             1.9312  2.9678   3.2715       0.89M   0.89M        1.95M           0.00T
    1  specialist, C++         2.1628  2.3174   3.3655       0.89M   0.89M        1.95M           0.50T
    1  specialist, Unicode     3.2625  3.5012   1.9219       0.89M   0.89M        1.95M           0.50T
    2  mixture, a = 0          1.9312  2.9678   3.2715       1.97M   1.43M        3.04M           1.00T
       mixture, a = 0.5        2.0600  2.8241   2.8107       1.97M   1.43M        3.04M           1.00T
    3  router trained          1.9802  2.6558   2.4176       1.97M   1.43M        3.04M           1.23T
    4  all trained             1.9173  2.3887   1.8689       1.97M   1.43M        3.04M           2.16T
    dense, the same rows       1.9599  2.0850   1.5822       0.89M   0.89M        1.95M           2.04T
    dense, new domains only    2.2866  2.1246   1.5136       0.89M   0.89M        1.95M           2.04T

The mixture kept its own text, and learned both domains in one model. But the dense model forgot only 0.03 nats on the same rows, a
fifth of them own text, and learned the new domains better, with 0.64 times the FLOPs per token: replay does most of the keeping
(differences as small as that need more seeds). Without replay it forgot 0.36. Nobody told the router that own text, which is Python,
resembles C++ more than lists of names: in the upper layers it takes 3 of 4 experts from the C++ specialist, lists 1 of 5 or so. The
balance term did not make the loads even: the busiest expert of a layer has 1.3 to 1.7 times its share, and 2 would be collapse.

How this differs from the paper. Of it only abstract, first page and a figure could be had, and no code. One shared expert and 64
others, 8 active, 53.3B parameters of which 13.3B are active: this fits the equations above within 0.1B, with 8 domains and G = 8.
The gate `a`, the factor K, the tied router rows, the balance term (DeepSeek's), what learns in stage 1 (FFNs alone, so that all
experts share one attention), and every number of steps are choices made here. What it does not show: scale, science, benchmarks.
The loop computes no idle expert, as the FLOPs say, but gathering the tokens of each takes time that they do not count.
"""
import contextlib
import copy
import os
import random
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common import fit, load_plain, loss_on, own_text, table, warm_up, windows
from configurator import build, read
from engine.errors import UserError, run
from engine.shards import encode
from prepare_data import walk


@dataclass
class InnovatorSettings:
    """the four stages; the dense models get as many rows"""
    shards: int = 4              # G: parts of each FFN, and K: how many parts a token takes; divides the checkpoint's mlp_hidden
    induce_steps: int = 100      # stage 1, for each of the two domains
    route_steps: int = 40        # stage 3
    joint_steps: int = 100       # stage 4
    batch_size: int = 8          # rows per step, each as long as the context; half of a mixed batch is the checkpoint's own text
    learning_rate: float = 1e-3  # after a warm-up constant, for all models; ten times this for the router in stage 3
    alpha: float = 1e-3          # weight of the balance term
    seed: int = 1337             # draws rows, and the router

    def __post_init__(self):
        for name in ('shards', 'induce_steps', 'route_steps', 'joint_steps', 'batch_size', 'learning_rate'):
            if not getattr(self, name) > 0: raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.batch_size % 4: raise ValueError(f"batch_size={self.batch_size} must be a multiple of 4: a mix is quarters")
        if self.alpha < 0: raise ValueError(f"alpha={self.alpha} must not be negative")


# ---- the mechanism ---------------------------------------------------------------------------------------------------

def split(mlp, G):
    """Stage 2. A SwiGLU of hidden width f, cut into G: gate and up rows (G, 2f/G, C), down columns (G, C, f/G)."""
    fc, proj = mlp.c_fc.weight.detach(), mlp.c_proj.weight.detach()                     # (2f, C), (C, f)
    fc = fc.unflatten(0, (2, G, -1)).transpose(0, 1).flatten(1, 2)                      # gate and up of a shard side by side
    return fc, proj.unflatten(1, (G, -1)).transpose(0, 1)


def route(r, K):
    """Router logits r (n, N) -> gates that sum to K, and the experts they belong to, both (n, K)."""
    top = r.topk(K)
    return K * top.values.softmax(-1), top.indices


class MoE(nn.Module):
    """y = FFN(x) + a sum_{e in top K} g_e E_e(x), in the place of a block's MLP. No token is dropped, so it stays causal."""

    def __init__(self, mlp, specialists, G):
        super().__init__()
        self.K, self.shared = G, mlp
        fc, proj = zip(*(split(specialist, G) for specialist in specialists))
        self.fc, self.proj = nn.Parameter(torch.cat(fc)), nn.Parameter(torch.cat(proj))  # (N, 2f/G, C), (N, C, f/G)
        N, _, C = self.fc.shape
        rows = torch.randn(len(specialists), C) * C ** -0.5                              # one per domain: the top K are its shards
        self.router = nn.Linear(C, N, bias=False)
        self.router.weight = nn.Parameter(rows.repeat_interleave(G, 0).to(fc[0]))
        self.a = nn.Parameter(torch.zeros(()).to(fc[0]))

    def forward(self, x):
        rows = x.flatten(0, 1)                                                           # (n, C), n = B T
        gates, top = route(self.router(rows), self.K)
        routed = torch.zeros_like(rows)
        for e, (fc, proj) in enumerate(zip(self.fc, self.proj)):                         # each expert sees its tokens only
            i, slot = (top == e).nonzero(as_tuple=True)
            gate, up = (rows[i] @ fc.t()).chunk(2, -1)
            routed = routed.index_add(0, i, gates[i, slot, None] * ((F.silu(gate) * up) @ proj.t()))
        return self.shared(x) + self.a * routed.view_as(x)


def upcycle(base, specialists, G):
    """A copy of the dense model with a MoE in every block, its routed experts cut from the specialists' FFNs."""
    model = copy.deepcopy(base)
    for layer, block in enumerate(model.h):
        block.mlp = MoE(block.mlp, [specialist.h[layer].mlp for specialist in specialists], G)
    return model


def loads(r, K):
    """f (N,): how often n tokens with logits r (n, N) chose each expert, 1 if all are chosen alike."""
    return torch.bincount(route(r, K)[1].flatten(), minlength=r.size(1)) * (r.size(1) / (K * len(r)))


def balance(r, K):
    """sum_e f_e P_e. f is a count, without gradient: P is what moves."""
    return (loads(r, K) * r.softmax(-1).mean(0)).sum()


# ---- training it -----------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def routers_of(model):
    """A list that collects (logits r (n, N), K) of every MoE that runs meanwhile; the model itself keeps no graph."""
    seen, mixtures = [], [m for m in model.modules() if isinstance(m, MoE)]
    hooks = [m.router.register_forward_hook(lambda _, x, r, K=m.K: seen.append((r, K))) for m in mixtures]
    try: yield seen
    finally:
        for hook in hooks: hook.remove()


def objective(model, rows, alpha):
    """Mean loss on rows (B, T + 1), and the balance term of every layer."""
    with routers_of(model) as seen: loss = model(rows[:, :-1], rows[:, 1:])[1]
    return loss + alpha * sum(balance(r, K) for r, K in seen)


def flops(call):
    """FLOPs of the matmuls in call(), counted by PyTorch: it sees attention only where that is made of matmuls."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH): call()
    return counter.get_total_flops()


def train(model, parameters, batches, rate, alpha, name):
    """Train these parameters of a model on a list of batches (B, T + 1), all others frozen; returns the FLOPs it took."""
    parameters = list(parameters)
    model.train().requires_grad_(False)
    for p in parameters: p.requires_grad_(True)
    loss = lambda i: objective(model, batches[i], alpha)
    cost = len(batches) * flops(lambda: torch.autograd.grad(loss(0), parameters))  # K experts per token: all steps cost the same
    fit(parameters, loss, warm_up(rate, len(batches)), name=name)
    model.eval()
    return cost


def stages(base, data, s, generator):
    """All models of the table as they come: yields (name, model, FLOPs of its training). data: {domain: rows (.., T + 1)}."""
    own, *new = data
    draw = lambda name, n: data[name][torch.randint(len(data[name]), (n,), generator=generator)]
    mix = lambda: torch.cat([draw(own, s.batch_size // 2), *(draw(name, s.batch_size // 4) for name in new)])
    single = {name: [draw(name, s.batch_size) for _ in range(s.induce_steps)] for name in new}
    routing, joint = ([mix() for _ in range(n)] for n in (s.route_steps, s.joint_steps))

    yield "the checkpoint", base, 0
    specialists, cost = [copy.deepcopy(base) for _ in new], 0
    for name, model in zip(new, specialists):
        ffns = [p for block in model.h for p in block.mlp.parameters()]
        spent = train(model, ffns, single[name], s.learning_rate, 0.0, f"stage 1, {name}")
        yield f"1  specialist, {name}", model, spent
        cost += spent
    model = upcycle(base, specialists, s.shards)
    yield "2  mixture, a = 0", model, cost
    for block in model.h: block.mlp.a.data.fill_(0.5)
    yield "   mixture, a = 0.5", model, cost
    learn = [p for block in model.h for p in (block.mlp.router.weight, block.mlp.a)]
    cost += train(model, learn, routing, 10 * s.learning_rate, s.alpha, "stage 3")
    yield "3  router trained", model, cost
    cost += train(model, model.parameters(), joint, s.learning_rate, s.alpha, "stage 4")
    yield "4  all trained", model, cost

    same = torch.cat([*sum(single.values(), []), *routing, *joint])
    only = torch.cat([draw(name, len(same) // 2) for name in new])
    for name, rows in (("dense, the same rows", same), ("dense, new domains only", only)):
        batches = rows[torch.randperm(len(rows), generator=generator)].split(s.batch_size)
        dense = copy.deepcopy(base)
        yield name, dense, train(dense, dense.parameters(), batches, s.learning_rate, 0.0, name)


# ---- the domains, and the tables -------------------------------------------------------------------------------------

def new_texts():
    """{domain: documents}: the headers of PyTorch's core library; lines such as 00E9 LATIN SMALL LETTER E WITH ACUTE, shuffled."""
    folder = os.path.join(os.path.dirname(torch.__file__), 'include', 'c10')
    if not os.path.isdir(folder): raise UserError(f"{folder}: PyTorch's C++ headers, a domain here, are missing; install it with pip")
    headers = [Path(path).read_bytes() for path in walk(folder)]
    names = {f"{c:04X}": unicodedata.name(chr(c), f"{c:04X}") for c in range(0x20000)}              # beyond are ideographs
    lines = [f"{number} {name}\n" for number, name in names.items() if not name.endswith(number)]  # nothing to learn from those
    random.Random(0).shuffle(lines)
    return {'C++': headers, 'Unicode': [''.join(lines[i:i + 100]).encode() for i in range(0, len(lines), 100)]}


def domains(settings, tokenizer, T, generator):
    """{domain: rows to train on}, {domain: 64 held-out rows}; rows (.., T + 1). The first domain is the checkpoint's own text."""
    data, held_out = ({'own text': windows(own_text(settings, split, 2 ** 22), T)} for split in ('train', 'val'))
    for name, documents in new_texts().items():
        tokens = [torch.from_numpy(encode(tokenizer, text).astype('int64')) for text in documents]
        held_out[name] = windows(torch.cat(tokens[::10]), T)  # every tenth document
        data[name] = windows(torch.cat([t for i, t in enumerate(tokens) if i % 10]), T)
    return data, {name: rows[torch.randperm(len(rows), generator=generator)[:64]] for name, rows in held_out.items()}


def sizes(model):
    """Parameters: (all, those that a token uses): K of a layer's N routed experts."""
    idle = [(m.fc.numel() + m.proj.numel()) * (len(m.fc) - m.K) // len(m.fc) for m in model.modules() if isinstance(m, MoE)]
    return model.num_params(), model.num_params() - sum(idle)


@torch.no_grad()
def measure(name, model, cost, held_out):
    """A row of the table."""
    losses = [loss_on(model, rows, batch_size=32) for rows in held_out.values()]
    row = held_out['own text'][:1, :-1]
    per_token = flops(lambda: model(row)) / row.numel()
    return [name, *losses, *(f"{n / 1e6:.2f}M" for n in (*sizes(model), per_token)), f"{cost / 1e12:.2f}T"]


@torch.no_grad()
def load_table(model, held_out):
    """For each layer: the share of its experts that a domain's text takes from the first specialist; the busiest expert."""
    lines, total = [], 0
    for name, rows in held_out.items():
        with routers_of(model) as seen: model.hidden(rows[:, :-1])
        f = torch.stack([loads(r, K) for r, K in seen])  # (L, N)
        lines.append([name, *(f"{share:.2f}" for share in f[:, :seen[0][1]].sum(1) / f.size(1))])
        total = total + f / len(held_out)
    lines.append(["load of the busiest expert over all, 1 is even", *(f"{most:.2f}" for most in total.amax(1))])
    return table([f"share of {list(held_out)[1]} experts in layer", *map(str, range(len(total)))], lines)


def main(argv):
    given, folders = read(argv, __doc__.strip(), InnovatorSettings)
    s = build(InnovatorSettings, given)
    if len(folders) != 1: raise UserError("name one checkpoint folder, such as: python exercises/labs/innovator.py out/vanilla")
    base, tokenizer, settings = load_plain(folders[0])
    if base.config.mlp_hidden % s.shards:
        raise UserError(f"shards={s.shards} does not divide the checkpoint's mlp_hidden={base.config.mlp_hidden}: choose another")
    torch.manual_seed(s.seed)
    generator = torch.Generator().manual_seed(s.seed)
    data, held_out = domains(settings, tokenizer, base.config.block_size, generator)
    rows = []
    for name, model, cost in stages(base, data, s, generator):
        rows.append(measure(name, model, cost, held_out))
        if name.startswith('4'): load = load_table(model, held_out)
    print(table(['stage', *held_out, 'parameters', 'active', 'FLOPs/token', 'training FLOPs'], rows), load, sep='\n\n')


if __name__ == '__main__':
    run(main)
