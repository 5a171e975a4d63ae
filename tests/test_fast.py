"""
FastGPT, with what engine/ puts in the place of parts of model.py, equals GPT over every toggle: in
training, in evaluation and in generation. And what both owe to those who train and copy them.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import LATENT_2, ONE_EACH, TOGGLES, close, make
from test_promises import few_sweeps, targets

from engine.fast import FastGPT
from model import GPT, PONDER, Mechanism
from train import Trainer


def both(toggle, **settings):
    """A GPT and a FastGPT with the same weights; few sweeps, so that guesses are compared too."""
    settings = {**few_sweeps(toggle), **settings}
    plain, fast = [make(**settings, kind=kind) for kind in (GPT, FastGPT)]
    fast.load_state_dict(plain.state_dict())
    return plain, fast


def losses_and_gradients(model, idx):
    """{(progress, drawn): [loss, gradient of each parameter, passes]} of training."""
    model.train()
    mechanism = model.mechanism
    y = targets(idx)
    y[0, :5] = -1
    found = {}
    for mechanism.progress in (0.0, 0.45, 1.0) if mechanism.halts else (1.0,):
        for mechanism.drawn in mechanism.draws():
            model.zero_grad()
            loss = model(idx, y)[1]
            loss.backward()
            results = [loss.detach()] + [p.grad.clone() for p in model.parameters()]
            if mechanism.halts:
                results.append(mechanism.passes.double())
            found[mechanism.progress, mechanism.drawn] = results
    return found


def test_logits_and_passes(toggle, idx):
    plain, fast = both(toggle)
    close(fast(idx)[0], plain(idx)[0])
    if plain.mechanism.halts:
        assert torch.equal(fast.mechanism.passes, plain.mechanism.passes)
    close(fast(idx, idx)[1], plain(idx, idx)[1])


def test_gradients_of_the_training_loss(toggle, idx):
    """At the beginning, on the ramp and at the end of halting's schedule; of all that is drawn."""
    counts = dict(halt_lambda=1.0, halt_share=0.5) if 'halting' in toggle else {}
    plain, fast = both(toggle, **counts)
    want, got = losses_and_gradients(plain, idx), losses_and_gradients(fast, idx)
    assert len(got) == (3 if 'halting' in toggle else 1) * len(plain.mechanism.draws())
    for case, results in want.items():
        for a, b in zip(got[case], results):
            close(a, b)


def read(model, idx, split, pad):
    """What comes out of a text in pieces, and the passes of its tokens."""
    memory, hidden, passes = model.new_memory(pad=pad), [], []
    with torch.no_grad():
        for part in idx.split(split, dim=1):
            hidden.append(model.hidden(part, memory))
            passes.append(model.mechanism.passes)
    return torch.cat(hidden, 1), torch.cat(passes, 1) if model.mechanism.halts else None


def test_texts_in_pieces(toggle, idx):
    plain, fast = both(toggle)
    split, pad = [6, 1, 1, 1, 4], torch.tensor([0, 3, 1])
    (want, want_passes), (got, passes) = [read(model, idx, split, pad) for model in (plain, fast)]
    real = torch.arange(13).expand(3, 13) >= pad[:, None]
    close(got[real], want[real])
    if plain.mechanism.halts:
        assert torch.equal(passes[real], want_passes[real])


def test_a_step_draws_R_by_the_seed_and_its_number():
    """And tells halting's schedule how far the run is."""
    model = make(**few_sweeps(LATENT_2))

    def drawn(seed):
        values = []
        for step in range(20):
            settings = SimpleNamespace(seed=seed, max_steps=40)
            Trainer.draw(SimpleNamespace(model=model, settings=settings, step=step))
            assert model.mechanism.progress == step / 40
            values.append(model.mechanism.drawn)
        return values

    assert set(drawn(1)) == {1, 2}
    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize('name', ONE_EACH)
def test_a_copy_computes_with_its_own_weights(name, idx):
    """It is made in the middle of a step, when there is a graph that no backward has used up."""
    model = make(**few_sweeps(TOGGLES[name])).train()
    model(idx, targets(idx))
    copied = copy.deepcopy(model)
    before = model(idx)[0].detach()
    assert torch.equal(copied(idx)[0], before)

    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(1.5)
    fresh = make(**few_sweeps(TOGGLES[name])).train()
    fresh.load_state_dict(copied.state_dict())
    assert torch.equal(copied(idx)[0], fresh(idx)[0])
    assert torch.equal(model(idx)[0], before)


@pytest.mark.parametrize('settings', [dict(), dict(ponder='chain')])
def test_a_second_pass_on_a_memory_has_to_be_opened(settings, idx):
    """Or a new mechanism would read keys of another pass, without a word."""
    model = make(**settings, kind=GPT)
    memory = model.new_memory()
    pos = memory.begin(idx)
    if settings:
        memory.for_pass(0)
    x = model.trunk(model.embed(idx), pos, memory)
    with pytest.raises(AssertionError, match='block 0 ran twice'):
        model.trunk(x, pos, memory)


@pytest.mark.parametrize('ponder', ['loop', 'chain'])
def test_a_memory_has_to_be_used(ponder, idx, kind):
    """Or a new mechanism would read a text at once, and each new token as if it were the first."""

    class Forgets(Mechanism):
        rule = PONDER[ponder].rule

        def forward(self, gpt, x, pos, memory):
            return gpt.trunk(x, pos)

    model = make(ponder=ponder, kind=kind)
    model.mechanism = Forgets(model.config)
    memory = model.new_memory()
    model.hidden(idx, memory)
    with pytest.raises(AssertionError, match='had this memory so far'):
        model.hidden(idx[:, :1], memory)
