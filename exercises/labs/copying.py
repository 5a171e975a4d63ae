"""
Lab: does a lower loss come from copying what stood in the text before? One minute.

    python exercises/labs/copying.py out/plain_5MB out/depth_5MB
        checkpoints of one data set and block_size, side by side; exercises/README.md has the
        commands that train these two

In-context Learning and Induction Heads (C. Olsson and others, arXiv 2209.11895): when the last few
tokens have stood in the text before, a model can look there for what followed. In a plain model it
takes two layers: one writes into each token which one stood before it, and a later one looks for a
token that stood behind the same one as here. The paper sees this learned within a short stretch of
training.

A token whose last MATCH tokens, itself included, stood before in its window has a match; what
followed there, the last time, is what copying foretells. Losses of the next token are averaged over

    no match
    as then         it is what followed then; a model that copies has a low loss here
    otherwise       it is something else; a model that copies may have a high loss here
    place           how far in the window; a model that copies gets better along the way

and over half a window of text, once, and again behind itself: all of that can be copied.

What it shows (2.8M parameters, 5 MB of text: runs of docs/claims.md at 2.8M; nats per byte; AdamW
on an AMD EPYC, 2026-11-28; Muon on an Intel Xeon, 2026-11-30):

                                    all  no match  as then  otherwise  to 255   again
    share of the bytes            1.000     0.594    0.322      0.083   0.500
    plain_scaled, seed 2          1.159     1.317    0.558      2.357   1.121   1.232
      with Depth-Attention        1.019     1.255    0.249      2.318   0.941   0.758
    the same after 10 MB          1.076     1.229    0.496      2.227   1.028   1.157
      with Depth-Attention        0.941     1.171    0.201      2.155   0.860   0.668
    with an average, seed 1       1.169     1.322    0.571      2.388   1.130   1.245
    plain_scaled, Muon, seed 2    0.940     1.179    0.184      2.162   0.857   0.607
      with Depth-Attention        0.955     1.193    0.192      2.209   0.875   0.641

Left out here are places 0 to 127, and `once`. "to 255" begins at 128.

With AdamW and Depth-Attention the model copies, and seven tenths of the gain come from bytes that
follow as they did the last time. Without Depth-Attention it hardly copies, nor with an average of
the same values. So does a plain model never learn it? In the paper those of two layers and more do,
after billions of tokens. And here it does with Muon, after 5 MB, and is ahead of Depth-Attention in
two seeds of five. One seed of each is shown: another may learn it sooner.
"""
import math
from dataclasses import dataclass

import torch

import common
from configurator import build, check_range, read
from engine.cpu import tune_cpu
from engine.files import UserError, run, table
from engine.mechanisms import iterates
from engine.score import token_nats
from engine.shards import read_meta
from engine.trained import data_dir_of, load_model
from engine.windows import Windows

MATCH = 3   # tokens, from which on it is one


@dataclass
class CopyingSettings:
    """what is measured"""
    windows: int = 256      # of the validation text, spread over it

    def __post_init__(self):
        check_range(self, 1, math.inf, 'windows')


def matches(x):
    """
    Tokens (B,T) -> (length, follower), (B,T) each: of each token, how many up to and with it stand
    in the same order somewhere before, at most; and what followed there, the last time.
    """
    length, follower = torch.zeros_like(x), torch.full_like(x, -1)
    ends = torch.zeros_like(x)      # of token i: how long the match is that ends at token j, (B,T)
    for i in range(x.size(1)):
        longer = torch.nn.functional.pad(ends[:, :-1], (1, 0)) + 1
        ends = longer.where(x == x[:, i:i + 1], 0)
        if i > 0:
            newest_first = ends[:, :i].flip(1)
            length[:, i], back = newest_first.max(1)
            follower[:, i] = x.gather(1, i - back[:, None])[:, 0]
    return length, follower


def groups(x, y):
    """{name: which tokens (B,T) belong to it}, of tokens x and the next ones y, (B,T) each."""
    length, follower = matches(x)
    place, quarter = torch.arange(x.size(1)).expand_as(x), x.size(1) // 4
    return {
        'all': torch.ones_like(x, dtype=torch.bool),
        'no match': length < MATCH,
        'as then': (length >= MATCH) & (follower == y),
        'otherwise': (length >= MATCH) & (follower != y),
        f'place 0 to {quarter - 1}': place < quarter,
        f'to {2 * quarter - 1}': (place >= quarter) & (place < 2 * quarter),
        f'to {x.size(1) - 1}': place >= 2 * quarter,
    }


def twice(x):
    """The first half of each row (B,T), and again behind it."""
    half = x[:, :x.size(1) // 2]
    return torch.cat((half, half), dim=1)


def main(argv):
    given, folders = read(argv, __doc__, CopyingSettings)
    s = build(CopyingSettings, given)
    if not folders:
        raise UserError(f"name checkpoint folders, see --help; make one with: {common.MAKE_ONE}")
    tune_cpu()
    loaded = [load_model(folder, 'cpu') for folder in folders]
    first, tokenizer, settings = loaded[0]
    T = first.config.block_size
    data_dir = data_dir_of(settings)
    for folder, (model, _, theirs) in zip(folders, loaded):
        if iterates(model):
            raise UserError(f"{folder}: reads a text by iteration, which this lab does not treat")
        if (model.config.block_size, data_dir_of(theirs)) != (T, data_dir):
            raise UserError(f"{folder}: has another block_size or data set than {folders[0]}")
    data = Windows(data_dir, 'val', read_meta(data_dir, tokenizer), T)
    x, y = data.get(data.spread(s.windows), torch.device('cpu'))
    if (y < 0).any():
        raise UserError(f"{data_dir} is a made task: take checkpoints of a text")

    named = groups(x, y)
    shares = [chosen.float().mean().item() for chosen in named.values()]
    rows = [['share of the tokens', *shares, '', '']]
    for folder, (model, _, _) in zip(folders, loaded):
        nats = token_nats(model, torch.cat((x, y[:, -1:]), dim=1))      # (B,T)
        of_groups = [nats[chosen].mean().item() for chosen in named.values()]
        both = token_nats(model, twice(x))      # (B, T - 1): of all tokens but the first
        once = both[:, :T // 2 - 1]             # the next would be the one where it begins again,
        again = both[:, T // 2:]                # which nothing foretells
        rows.append([folder, *of_groups, once.mean().item(), again.mean().item()])
    print(table(['nats per token', *named, 'once', 'again'], rows))


if __name__ == '__main__':
    run(main)
