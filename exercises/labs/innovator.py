"""
Lab: a dense checkpoint becomes a mixture of experts, so that it learns new domains and keeps the
old one.

    python exercises/labs/innovator.py out/lab
        some minutes on a CPU
    python exercises/labs/innovator.py out/lab --seed=2
        other draws, another router; --help lists the settings

Innovator (arXiv 2507.18671): training a dense model further on science makes it forget. So its FFNs
become experts, while it trains: a shared one, for what the model could do before, and many small
ones, for the new domains, of which a router picks K.

    stage 1, induction   for each new domain j, a copy of the model is trained on it: FFN_j
    stage 2, splitting   FFN_j is cut along its hidden width f into G shards of width f / G:
                         E_{j,i}(x) = Wdown_j[:, i] (silu(Wgate_j[i] x) * (Wup_j[i] x))
                         sum_i E_{j,i}(x) = FFN_j(x)
    stage 3, routing     r = W x, one number for each of the N shards
                         gates g = K softmax over the K = G largest
                         y = FFN(x) + a sum_{e in top K} g_e E_e(x)
                         only W and a learn, on a mix of all domains
    stage 4, joint       everything learns, on such a mix
    from stage 3 on      loss += alpha sum over layers of sum_e f_e P_e
                         f_e = N / (K n) times how often n tokens chose shard e
                         P_e the mean over them of softmax(r)_e
                         so the sum is 1 for even loads, N / K if K always win

The sum of shards is not weighted, so gates that sum to 1 would shrink it by G: hence the factor K.
The scalar `a` of each layer starts at 0, where the mixture is the dense model, bit for bit,
whatever the specialists learned. There the router has no gradient, so stage 3 opens it to 0.5. A
router that starts with one row for each domain, repeated for its G shards, picks whole FFN_j; the
rows part in training. Here N = 2 G: the domains are C++ (PyTorch's headers) and lists of Unicode's
character names, both on every machine. The checkpoint's own text plays the part of general
knowledge.

The table has losses in nats per token on each domain; parameters, and those that a token uses
("active"); FLOPs of a token in use, and of all training so far, both counted by PyTorch as it runs.
Two dense models are what all this competes with: one trained on the very rows that the mixture saw,
in another order, one on as many rows of the new domains alone. Measured with a checkpoint of 0.9M
parameters (tools/compare.py's `plain`), on two cores of an Intel Xeon at 2.5 GHz, one seed,
2026-11-21, when train.py read its windows in another order:

                          own text     C++  Unicode  parameters  active  FLOPs/token  training FLOPs
    the checkpoint          1.9312  2.9678   3.2715       0.89M   0.89M        1.95M           0.00T
    1  specialist, C++      2.1628  2.3174   3.3655       0.89M   0.89M        1.95M           0.50T
    1  specialist, Unicode  3.2625  3.5012   1.9219       0.89M   0.89M        1.95M           0.50T
    2  mixture, a = 0       1.9312  2.9678   3.2715       1.97M   1.43M        3.04M           1.00T
       mixture, a = 0.5     2.0600  2.8241   2.8107       1.97M   1.43M        3.04M           1.00T
    3  router trained       1.9802  2.6558   2.4176       1.97M   1.43M        3.04M           1.23T
    4  all trained          1.9173  2.3887   1.8689       1.97M   1.43M        3.04M           2.16T
    dense, the same rows    1.9599  2.0850   1.5822       0.89M   0.89M        1.95M           2.04T
    dense, new domains only 2.2866  2.1246   1.5136       0.89M   0.89M        1.95M           2.04T

The mixture kept its own text, and learned both domains in one model. But the dense model forgot
only 0.03 nats on the same rows, a fifth of them own text, and learned the new domains better, with
0.64 times the FLOPs per token: replay does most of the keeping (differences as small as that need
more seeds). Without replay it forgot 0.36. Nobody told the router that own text, which is Python,
resembles C++ more than lists of names: in the upper layers it takes 3 of 4 experts from the C++
specialist, lists 1 of 5 or so. The balance term did not make the loads even: the busiest expert of
a layer has 1.3 to 1.7 times its share, and 2 would be collapse.

How this differs from the paper. Of it only abstract, first page and a figure could be had, and no
code. One shared expert and 64 others, 8 active, 53.3B parameters of which 13.3B are active: this
fits the equations above within 0.1B, with 8 domains and G = 8. The gate `a`, the factor K, the tied
router rows, the balance term (DeepSeek's), what learns in stage 1 (FFNs alone, so that all experts
share one attention), and every number of steps are choices made here. What it does not show: scale,
science, benchmarks. The loop computes no idle expert, as the FLOPs say, but gathering the tokens of
each takes time that they do not count.
"""
import copy
import math
import random
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import fit, joined, load_plain, loss_on, own_text, start, text_loss, windows
from configurator import check_range
from engine.files import UserError, run, table
from engine.flops import counted
from prepare_data import walk

OWN_TEXT = 'own text'  # the checkpoint's own domain


@dataclass
class InnovatorSettings:
    """the four stages; the dense models get as many rows"""
    shards: int = 4              # G: parts of each FFN; a token takes K = G; divides mlp_hidden
    induce_steps: int = 100      # stage 1, for each of the two domains
    route_steps: int = 40        # stage 3
    joint_steps: int = 100       # stage 4
    batch_size: int = 8          # rows per step, as long as the context; half of a mix is own text
    learning_rate: float = 1e-3  # after a warm-up constant; ten times this in stage 3
    alpha: float = 1e-3          # weight of the balance term
    seed: int = 1337             # draws rows, and the router

    def __post_init__(self):
        check_range(self, 1, math.inf, 'shards', 'induce_steps', 'route_steps', 'joint_steps')
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        if self.batch_size % 4:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of 4: a mix is quarters")


# ---- the mixture of experts ----------------------------------------------------------------------

def split(mlp, G):
    """
    Stage 2. A SwiGLU of hidden width f, cut into G: gate and up rows (G, 2f/G, C), down columns
    (G, C, f/G).
    """
    fc = mlp.c_fc.weight.detach()                                   # (2f, C): gate rows, up rows
    fc = fc.unflatten(0, (2, G, -1))                                # (2, G, f/G, C)
    fc = fc.transpose(0, 1).flatten(1, 2)                           # (G, 2f/G, C)
    proj = mlp.c_proj.weight.detach()                               # (C, f)
    proj = proj.unflatten(1, (G, -1)).transpose(0, 1)               # (G, C, f/G)
    return fc, proj


def route(r, K):
    """Router logits r (n, N) -> gates that sum to K, and the experts they are of, both (n, K)."""
    top = r.topk(K)
    return K * top.values.softmax(-1), top.indices


class MoE(nn.Module):
    """
    y = FFN(x) + a sum_{e in top K} g_e E_e(x), in the place of a block's MLP. No token is dropped,
    so it stays causal.
    """

    def __init__(self, mlp, specialists, G):
        super().__init__()
        self.K = G
        self.r = None                       # the router's logits of the last text (n, N)
        self.shared = mlp
        shards = [split(specialist, G) for specialist in specialists]
        self.fc = nn.Parameter(torch.cat([fc for fc, _ in shards]))         # (N, 2f/G, C)
        self.proj = nn.Parameter(torch.cat([proj for _, proj in shards]))   # (N, C, f/G)
        N, _, C = self.fc.shape

        # one row per domain, repeated: at first the top K are its shards
        rows = torch.randn(len(specialists), C) * C ** -0.5                 # (domains, C)
        rows = rows.repeat_interleave(G, 0).to(self.fc.dtype)               # (N, C)
        self.router = nn.Linear(C, N, bias=False)
        self.router.weight = nn.Parameter(rows)
        self.a = nn.Parameter(torch.zeros((), dtype=self.fc.dtype))

    def forward(self, x):
        tokens = x.flatten(0, 1)                                            # (n, C), n = B T
        self.r = self.router(tokens)                                        # (n, N)
        gates, top = route(self.r, self.K)                                  # (n, K), (n, K)
        routed = torch.zeros_like(tokens)
        for e, (fc, proj) in enumerate(zip(self.fc, self.proj)):
            # each expert sees its tokens only
            chosen, slot = (top == e).nonzero(as_tuple=True)                # (chosen,), (chosen,)
            gate, up = (tokens[chosen] @ fc.t()).chunk(2, -1)               # (chosen, f/G)
            output = (F.silu(gate) * up) @ proj.t()                         # (chosen, C)
            routed = routed.index_add(0, chosen, gates[chosen, slot, None] * output)
        return self.shared(x) + self.a * routed.view_as(x)


def upcycle(base, specialists, G):
    """
    A copy of the dense model with a MoE in every block, its routed experts cut from the
    specialists' FFNs.
    """
    model = copy.deepcopy(base)
    for layer, block in enumerate(model.h):
        ffns = [specialist.h[layer].mlp for specialist in specialists]
        block.mlp = MoE(block.mlp, ffns, G)
    return model


def mixtures(model):
    """All MoE in a model, by layer; none in a dense one."""
    return [module for module in model.modules() if isinstance(module, MoE)]


# ---- the balance term ----------------------------------------------------------------------------

def loads(r, K):
    """
    f (N,): how often n tokens with logits r (n, N) chose each expert, 1 if all are chosen alike.
    """
    n, N = r.shape
    _, chosen = route(r, K)
    counts = torch.bincount(chosen.flatten(), minlength=N)
    return counts * (N / (K * n))


def balance(r, K):
    """sum_e f_e P_e. f is a count, without gradient: P is what moves."""
    P = r.softmax(-1).mean(0)                                       # (N,)
    return (loads(r, K) * P).sum()


# ---- training ------------------------------------------------------------------------------------

def objective(model, rows, alpha):
    """Mean loss on rows (B, T + 1), and the balance term of every layer."""
    loss = text_loss(model, rows)
    return loss + alpha * sum(balance(mixture.r, mixture.K) for mixture in mixtures(model))


def flops(call):
    """FLOPs of the matmuls in call(), counted by PyTorch."""
    with counted() as counter:
        call()
    return counter.flops


def train(name, model, parameters, batches, s, faster=1):
    """
    Train these parameters of a model on a list of batches (B, T + 1), all others frozen, at
    `faster` times the learning rate of the settings; returns the FLOPs it took.
    """
    parameters = list(parameters)
    model.train().requires_grad_(False)
    for p in parameters:
        p.requires_grad_(True)

    def loss(i):
        return objective(model, batches[i], s.alpha)

    # K experts per token: all steps cost the same
    step_cost = flops(lambda: torch.autograd.grad(loss(0), parameters))
    fit(name, parameters, loss, faster * s.learning_rate, len(batches))
    model.eval()
    return len(batches) * step_cost


# ---- the stages ----------------------------------------------------------------------------------

def draw(rows, n, generator):
    """n of the rows, with replacement."""
    return rows[torch.randint(len(rows), (n,), generator=generator)]


def draw_mix(data, s, generator):
    """A batch of all domains: one half of the checkpoint's own, a quarter of each new one."""
    own, *new = data.values()
    parts = [draw(own, s.batch_size // 2, generator)]
    parts += [draw(rows, s.batch_size // 4, generator) for rows in new]
    return torch.cat(parts)


def shuffled(rows, generator):
    return rows[torch.randperm(len(rows), generator=generator)]


def stages(base, data, s, generator):
    """
    All models of the table as they come: yields (name, model, FLOPs of its training).
    data: {domain: rows (.., T + 1)}, the checkpoint's own first.
    """
    _, *new = data
    seen = []                           # batches that the mixture or its parts were trained on
    yield "the checkpoint", base, 0

    # 1, induction: a specialist for each new domain, whose FFNs alone learn
    specialists = []
    cost = 0
    for domain in new:
        batches = [draw(data[domain], s.batch_size, generator) for _ in range(s.induce_steps)]
        specialist = copy.deepcopy(base)
        learning = [p for block in specialist.h for p in block.mlp.parameters()]
        spent = train(f"stage 1, {domain}", specialist, learning, batches, s)
        yield f"1  specialist, {domain}", specialist, spent
        specialists.append(specialist)
        seen += batches
        cost += spent

    # 2, splitting: the specialists' FFNs become shards of one model
    model = upcycle(base, specialists, s.shards)
    yield "2  mixture, a = 0", model, cost
    for mixture in mixtures(model):
        mixture.a.data.fill_(0.5)       # from here on the routed experts count
    yield "   mixture, a = 0.5", model, cost

    # 3, routing: the routers and `a` learn
    batches = [draw_mix(data, s, generator) for _ in range(s.route_steps)]
    learning = [p for mixture in mixtures(model) for p in (mixture.router.weight, mixture.a)]
    cost += train("stage 3", model, learning, batches, s, faster=10)
    yield "3  router trained", model, cost
    seen += batches

    # 4, joint: everything learns
    batches = [draw_mix(data, s, generator) for _ in range(s.joint_steps)]
    cost += train("stage 4", model, model.parameters(), batches, s)
    yield "4  all trained", model, cost
    seen += batches

    # what it competes with, dense: all these rows, and as many of the new domains alone
    same = torch.cat(seen)                                          # (rows, T + 1)
    only_new = torch.cat([draw(data[domain], len(same) // 2, generator) for domain in new])
    for name, rows in (("dense, the same rows", same), ("dense, new domains only", only_new)):
        model = copy.deepcopy(base)
        batches = shuffled(rows, generator).split(s.batch_size)
        yield name, model, train(name, model, model.parameters(), batches, s)


# ---- the domains ---------------------------------------------------------------------------------

def new_texts():
    """
    {domain: documents}: the headers of PyTorch's core library; lines such as
    00E9 LATIN SMALL LETTER E WITH ACUTE, shuffled.
    """
    folder = Path(torch.__file__).parent / 'include' / 'c10'
    headers = [Path(path).read_bytes() for path in walk(folder)]

    lines = []
    for code in range(0x20000):                 # beyond are ideographs
        number = f"{code:04X}"
        name = unicodedata.name(chr(code), number)
        if not name.endswith(number):           # nothing to learn from a name that is its number
            lines.append(f"{number} {name}\n")
    random.Random(0).shuffle(lines)
    lists = [''.join(lines[i:i + 100]).encode() for i in range(0, len(lines), 100)]
    return {'C++': headers, 'Unicode': lists}


def domains(settings, tokenizer, T, generator):
    """
    {domain: rows to train on}, {domain: 64 held-out rows}; rows (.., T + 1). The first domain is
    the checkpoint's own text.
    """
    data = {OWN_TEXT: windows(own_text(settings, 'train', 2 ** 22, tokenizer), T)}
    held_out = {OWN_TEXT: windows(own_text(settings, 'val', 2 ** 22, tokenizer), T)}
    for name, documents in new_texts().items():
        others = [document for i, document in enumerate(documents) if i % 10]
        data[name] = windows(joined(others, tokenizer), T)
        held_out[name] = windows(joined(documents[::10], tokenizer), T)
    return data, {name: shuffled(rows, generator)[:64] for name, rows in held_out.items()}


# ---- the tables ----------------------------------------------------------------------------------

def sizes(model):
    """Parameters: (all, those that a token uses): K of a layer's N routed experts."""
    total = model.num_params()
    idle = 0
    for mixture in mixtures(model):
        experts = mixture.fc.numel() + mixture.proj.numel()
        idle += experts - experts * mixture.K // len(mixture.fc)
    return total, total - idle


@torch.no_grad()
def measure(name, model, cost, held_out):
    """A row of the first table."""
    losses = [loss_on(model, rows) for rows in held_out.values()]
    row = held_out[OWN_TEXT][:1, :-1]                               # (1, T)
    per_token = flops(lambda: model(row)) / row.numel()
    counts = [f"{n / 1e6:.2f}M" for n in (*sizes(model), per_token)]
    return [name, *losses, *counts, f"{cost / 1e12:.2f}T"]


@torch.no_grad()
def load_table(model, held_out):
    """
    For each layer: the share of its experts that a domain's text takes from the first specialist;
    the busiest expert.
    """
    lines = []
    total = 0
    for name, rows in held_out.items():
        model.hidden(rows[:, :-1])
        f = torch.stack([loads(mixture.r, mixture.K) for mixture in mixtures(model)])   # (L, N)
        first, _ = f.chunk(2, 1)                                    # the first specialist's shards
        lines.append([name, *two_decimals(first.sum(1) / f.size(1))])
        total = total + f / len(held_out)
    lines.append(["load of the busiest expert over all, 1 is even", *two_decimals(total.amax(1))])

    _, first_specialist, _ = held_out
    header = [f"share of {first_specialist} experts in layer", *map(str, range(len(total)))]
    return table(header, lines)


def two_decimals(numbers):
    return [f"{number:.2f}" for number in numbers]


def main(argv):
    s, [folder] = start(argv, __doc__, InnovatorSettings)
    base, tokenizer, settings = load_plain(folder)
    if base.config.mlp_hidden % s.shards:
        raise UserError(
            f"shards={s.shards} does not divide the checkpoint's "
            f"mlp_hidden={base.config.mlp_hidden}: choose another")

    torch.manual_seed(s.seed)
    generator = torch.Generator().manual_seed(s.seed)
    data, held_out = domains(settings, tokenizer, base.config.block_size, generator)
    rows = []
    for name, model, cost in stages(base, data, s, generator):
        rows.append(measure(name, model, cost, held_out))
        if name.startswith('4'):
            load = load_table(model, held_out)

    header = ['stage', *held_out, 'parameters', 'active', 'FLOPs/token', 'training FLOPs']
    print(table(header, rows), load, sep='\n\n')


if __name__ == '__main__':
    run(main)
