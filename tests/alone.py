"""
Runs beside a copy of model.py, in a folder that has nothing else: test_alone.py.

    python alone.py TOGGLES     {name: settings of GPTConfig}, as JSON

Prints what it found of each, as JSON.
"""

import json
import sys

import torch

from model import GPT, GPTConfig, Halting

STEPS = 5
PROMPTS = [[3, 1, 4, 1, 5], [7, 1]]
NEW = 4         # tokens that each of them goes on with


def new_model(settings):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, n_tokens=50, block_size=12, n_layer=3, n_head=4, n_embd=32,
                         mlp_hidden=48, init_std=0.2, **settings))


def train(gpt):
    """A few steps on one batch; returns the loss before and after them."""
    tokens = torch.randint(0, 50, (4, 13))
    idx, targets = tokens[:, :-1], tokens[:, 1:]
    before = gpt.eval()(idx, targets)[1].item()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-2)
    gpt.train()
    for step in range(STEPS):
        gpt.mechanism.begin_step(step, STEPS)
        _, loss = gpt(idx, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return before, gpt.eval()(idx, targets)[1].item()


def leave_undecided(gpt):
    """Gates and routers begin anew, so that some tokens stop and some do not."""
    for name, p in gpt.mechanism.named_parameters():
        if name.startswith(('gates.', 'gate.', 'router.')):
            torch.nn.init.normal_(p, std=0.2 if p.dim() == 2 else 0.0)


@torch.no_grad()
def from_a_cache(gpt, prompts):
    """What prompts of one batch go on with, (B,NEW), and the logits of these tokens (B,NEW,V)."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    pad = torch.tensor([longest - len(prompt) for prompt in prompts]) if len(prompts) > 1 else None
    new, memory, logits = torch.tensor(rows), gpt.new_memory(pad), []
    for _ in range(NEW):
        logits.append(gpt.head(gpt.hidden(new, memory)[:, -1]))         # (B,V)
        new = logits[-1].argmax(-1, keepdim=True)
    logits = torch.stack(logits, dim=1)
    return logits.argmax(-1), logits


@torch.no_grad()
def recomputed(gpt, prompt):
    """The same of one prompt, where the whole text is read for each new token: (NEW,), (NEW,V)."""
    text, logits = torch.tensor([prompt]), []
    for _ in range(NEW):
        logits.append(gpt(text)[0][0, -1])
        text = torch.cat((text, logits[-1].argmax().view(1, 1)), dim=1)
    return text[0, len(prompt):], torch.stack(logits)


def generate(gpt):
    """How prompts go on from a cache, in a batch and alone, compared with reading all anew."""
    passes, errors, equal = [], [], True
    for prompts in PROMPTS, PROMPTS[:1]:
        new, logits = from_a_cache(gpt, prompts)
        for row, prompt in enumerate(prompts):
            want, want_logits = recomputed(gpt, prompt)
            if isinstance(gpt.mechanism, Halting):
                passes += gpt.mechanism.passes.flatten().tolist()
            alone = gpt.generate(torch.tensor([prompt]), NEW, temperature=0)[0, len(prompt):]
            equal = equal and torch.equal(new[row], want) and torch.equal(alone, want)
            errors.append((logits[row] - want_logits)[:, :50].abs().max().item())
    return dict(equal=equal, error=max(errors), passes=sorted(set(passes)))


def main(toggles):
    torch.set_num_threads(1)
    found = {}
    for name, settings in toggles.items():
        gpt = new_model(settings)
        before, after = train(gpt)
        leave_undecided(gpt)
        gpt = gpt.double()
        longest = max(map(len, PROMPTS)) + NEW
        gpt.config.jacobi_iters = longest * gpt.mechanism.K     # exact
        if gpt.config.ponder == 'feedback':
            gpt.config.ponder_steps = longest                   # the same
        found[name] = dict(before=before, after=after, **generate(gpt))
    return found


if __name__ == '__main__':
    print(json.dumps(main(json.loads(sys.argv[1]))))
