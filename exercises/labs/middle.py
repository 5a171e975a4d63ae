"""
Lab: the middle blocks twice, switched on late. Hours with the default seeds; stopped, it goes on.

    python exercises/labs/middle.py config/size/tiny.py
        four runs for each of four seeds, and a table of paired differences
    python exercises/labs/middle.py config/size/tiny.py --seeds=1 --start=0.35 --out=out/middle-35
        one seed; the blocks are repeated from 35 % of the training steps on. Other settings need
        another --out

Public records for the speed of training small GPTs repeat two or three blocks in the middle once
more, from a third or half of the run on, and report gains of 0.003 to 0.004 nats at equal time.
The whole stack in a loop loses at equal FLOPs, see docs/results.md. This lab asks the same of the
tiny recipe. Its class is like the one of docs/architecture.md, "Adding a mechanism", with a start:

    before `start`    x = last(middle(first(x)))            the plain GPT
    from then on      x = last(middle(middle(first(x))))

Runs of one seed see the same text in the same order; `plain` and `late` are one run until `start`,
so what differs between these two is what the second pass does.

    plain             one pass
    late              the middle blocks twice from `start` on
    whole             the middle blocks twice from the first step on
    plain_longer      one pass, with more steps, so that its FLOPs are those of `late`
"""
import os
import statistics
import sys
from dataclasses import asdict, dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)  # so that a lab runs from anywhere

import train
from configurator import build, check_range, read
from engine.fast import without_numbers
from engine.files import run, table
from model import PONDER, GPTConfig, Mechanism
from tools.compare import final_loss, keep_recipe


@dataclass
class LabSettings:
    """what to compare; every other setting is train.py's"""
    start: float = 0.5          # share of the training steps after which the blocks are repeated
    seeds: str = '1,2,3,4'      # of the runs
    out: str = 'out/middle'     # folder of the runs

    def __post_init__(self):
        check_range(self, 0, 1, 'start')


class LateMiddle(Mechanism):
    """
    The middle blocks K + 1 times from `begin` on, once before; the first and the last n_layer // 3
    blocks once. K is ponder_steps.
    """
    begin = 0.0     # share of the training steps

    def forward(self, gpt, x, pos, memory):
        n_layer, third = self.config.n_layer, self.config.n_layer // 3
        rounds = self.K + 1 if self.progress >= self.begin else 1
        x = gpt.trunk(x, pos, memory['first'], layers=range(third), norm=False)
        for k in range(rounds):
            x = gpt.trunk(x, pos, memory[k], layers=range(third, n_layer - third), norm=False)
        return gpt.trunk(x, pos, memory['last'], layers=range(n_layer - third, n_layer))


@dataclass
class Arm:
    """One way to train, for all seeds."""
    name: str
    options: list       # of train.py
    begin: float        # of LateMiddle
    cost: float         # training FLOPs, as a multiple of plain's


def make_arms(common, start):
    """The four arms; common: train.py's arguments for all."""
    given, _ = read(common, '', train.Settings, GPTConfig)
    # the byte tokenizer: 256 bytes and the end of a text, padded to 320
    config = {**given, 'vocab_size': 320, 'n_tokens': 257, 'ponder': 'middle'}
    gpts = [without_numbers(build(GPTConfig, {**config, 'ponder_steps': K})) for K in (0, 1)]
    once, twice = [gpt.flops_per_token() for gpt in gpts]
    whole_cost = twice / once
    late_cost = start + (1 - start) * whole_cost
    longer = round(build(train.Settings, given).max_steps * late_cost)
    plain = ['--ponder=middle', '--ponder_steps=0']
    middle = ['--ponder=middle', '--ponder_steps=1']
    return [
        Arm('plain', plain, 0.0, 1.0),
        Arm('late', middle, start, late_cost),
        Arm('whole', middle, 0.0, whole_cost),
        Arm('plain_longer', [*plain, f'--max_steps={longer}'], 0.0, late_cost),
    ]


def train_arm(arm, seed, common, out):
    """The final loss of one run, which is made unless it is there."""
    folder = os.path.join(out, f'{arm.name}-from{arm.begin:g}-s{seed}')
    args = [*common, *arm.options]
    given, _ = read(args, '', train.Settings, GPTConfig)
    settings = asdict(build(train.Settings, given))
    if final_loss(folder, settings) is None:
        LateMiddle.begin = arm.begin    # train.main makes the model, and has no such setting
        resume = ['--init_from=resume'] if os.path.exists(os.path.join(folder, 'ckpt.pt')) else []
        train.main([*args, *resume, f'--seed={seed}', f'--out_dir={folder}'])
    loss = final_loss(folder, settings)
    if loss is None:
        raise SystemExit(130)   # stopped; the same command goes on
    return loss


def main(argv):
    PONDER['middle'] = LateMiddle
    names = LabSettings.__dataclass_fields__
    ours = [arg for arg in argv if arg[2:].split('=')[0] in names or arg in ('-h', '--help')]
    common = train.with_size([arg for arg in argv if arg not in ours])
    s = build(LabSettings, read(ours, __doc__, LabSettings)[0])
    keep_recipe(s.out, [*common, f'--start={s.start}'])     # UserError if runs there had another
    arms = make_arms(common, s.start)
    losses = {arm.name: [] for arm in arms}
    for seed in s.seeds.split(','):
        for arm in arms:
            losses[arm.name].append(train_arm(arm, seed, common, s.out))

    rows = []
    for arm in arms:
        differences = [loss - plain for loss, plain in zip(losses[arm.name], losses['plain'])]
        rows.append([arm.name, f"{statistics.mean(losses[arm.name]):.4f}",
                     f"{statistics.mean(differences):+.4f}",
                     f"{min(differences):+.4f} to {max(differences):+.4f}", arm.cost])
    print(table(['run', 'nats per byte', 'minus plain', 'lowest to highest', 'x FLOPs'], rows))


if __name__ == '__main__':
    run(main)
