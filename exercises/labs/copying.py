"""
Lab: does a lower loss come from copying what stood in the text before? One minute.

    python exercises/labs/copying.py out/vanilla out/depth_attn
        checkpoints of one data set and block_size, side by side

In-context Learning and Induction Heads (C. Olsson and others, arXiv 2209.11895): when the last few
tokens have occurred before, a model can look there for what followed. It takes two layers: one
writes into each token what stood before it, and a later one looks for a token before which the same
stood as here. The paper sees this come within a short stretch of training, as a fall of the loss
at places late in a text.

So each token of the validation windows is asked two things, and losses are averaged by the answers:

    match       how many tokens, up to and with the last one, have stood in this order before
    place       how far in the window it is

Who copies has a lower loss where the match is long, and the lower, the further in the window. And
the paper's own test: tokens in random order, and then the same again, which only copying foretells.

What it shows (2.8M parameters, 5 MB of text: the runs of docs/claims.md at 2.8M, seeds 2, 2, 1;
nats per byte; AMD EPYC, 2026-11-28):

                                      match                         place
                                 all    0-2    3-5    6-9    10-     0-63  64-127 128-255
    share of the bytes                0.594  0.164  0.111  0.130    0.250   0.250   0.500
    plain_scaled               1.159  1.317  0.934  0.863  0.975    1.234   1.160   1.121
      with Depth-Attention     1.019  1.255  0.726  0.625  0.651    1.188   1.006   0.941
      with an average          1.169  1.322  0.940  0.883  1.004    1.242   1.174   1.130

                            random bytes  again
    plain_scaled                   5.247  5.236
      with Depth-Attention         5.193  4.011
      with an average              5.457  5.467

With Depth-Attention the model copies, and three quarters of what it gains it gains where the last
three bytes or more have stood before. Without it the model does not copy, nor with an average of
the same values, and hardly after twice the text (5.337, 5.265).

What it does not show is that a plain model would never learn it. Large ones do, with more text; and
a match is only the simplest reason to look back.
"""
import math
from dataclasses import dataclass

import torch

import common
from configurator import build, check_range, read
from engine.files import UserError, run, table
from engine.hardware import tune_cpu
from engine.loss import token_nats
from engine.shards import read_meta
from engine.windows import Windows
from sample import data_dir_of, load_model

MATCHES = (0, 2), (3, 5), (6, 9), (10, math.inf)    # from, to


@dataclass
class CopyingSettings:
    """what is measured"""
    windows: int = 256      # of the validation text, spread over it

    def __post_init__(self):
        check_range(self, 1, math.inf, 'windows')


def match_lengths(x):
    """
    Tokens (B,T) -> (B,T): of each token, how many up to and with it stand in the same order
    somewhere before, at most.
    """
    found = torch.zeros_like(x)
    ends = torch.zeros_like(x)      # of token i: how long the match is that ends at token j, (B,T)
    for i in range(x.size(1)):
        longer = torch.nn.functional.pad(ends[:, :-1], (1, 0)) + 1
        ends = longer.where(x == x[:, i:i + 1], 0)
        if i > 0:
            found[:, i] = ends[:, :i].amax(1)
    return found


def groups(match):
    """{name: which tokens (B,T) belong to it}, of the matches (B,T)."""
    place = torch.arange(match.size(1)).expand_as(match)
    named = {'all': torch.ones_like(match, dtype=torch.bool)}
    for low, high in MATCHES:
        name = f'match {low} to {high}' if high < math.inf else f'match {low} or more'
        named[name] = (match >= low) & (match <= high)
    quarter = match.size(1) // 4
    for low, high in ((0, quarter), (quarter, 2 * quarter), (2 * quarter, match.size(1))):
        named[f'place {low} to {high - 1}'] = (place >= low) & (place < high)
    return named


def repeated(x):
    """The tokens (B,T) in random order, half of each row: once, and again behind it (B, T)."""
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(x.numel(), generator=draw)
    half = x.flatten()[order].view_as(x)[:, :x.size(1) // 2]
    return torch.cat((half, half), dim=1)


def main(argv):
    given, folders = read(argv, __doc__, CopyingSettings)
    s = build(CopyingSettings, given)
    if not folders:
        raise UserError(f"name checkpoint folders, see --help; make one with: {common.MAKE_ONE}")
    tune_cpu()
    loaded = [load_model(folder, 'cpu') for folder in folders]
    _, tokenizer, settings = loaded[0]
    T = loaded[0][0].config.block_size
    data_dir = data_dir_of(settings)
    for folder, (model, _, theirs) in zip(folders, loaded):
        if (model.config.block_size, data_dir_of(theirs)) != (T, data_dir):
            raise UserError(f"{folder}: has another block_size or data set than {folders[0]}")
    data = Windows(data_dir, 'val', read_meta(data_dir, tokenizer), T)
    x, y = data.get(data.spread(s.windows), torch.device('cpu'))
    if (y < 0).any():
        raise UserError(f"{data_dir} is a made task: take checkpoints of a text")

    named = groups(match_lengths(x))
    shares = [chosen.float().mean().item() for chosen in named.values()]
    rows = [['share of the tokens', *shares, '', '']]
    for folder, (model, _, _) in zip(folders, loaded):
        nats = token_nats(model, torch.cat((x, y[:, -1:]), dim=1))      # (B,T)
        of_groups = [nats[chosen].mean().item() for chosen in named.values()]
        once, again = token_nats(model, repeated(x)).tensor_split([T // 2], dim=1)
        rows.append([folder, *of_groups, once.mean().item(), again.mean().item()])
    print(table(['nats per token', *named, 'random', 'again'], rows))


if __name__ == '__main__':
    run(main)
