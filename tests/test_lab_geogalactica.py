"""
exercises/labs/geogalactica.py: the mix is exact, only answers are learned, replay saves what it
should, controls stay at chance.
"""
import copy
import json
import math
import os
import re
import runpy
import shutil
import sys

import pytest
import torch
from conftest import ROOT, make, save

sys.path.insert(0, os.path.join(ROOT, 'exercises', 'labs'))
import geogalactica as lab
import minerals
from common import fit, loss_on, text_loss, warm_up
from engine.files import UserError
from engine.shards import get_tokenizer

EOT = 49  # in models with n_tokens=50
PAIRS = [
    ((1, 2, 3), (4,)),
    ((5, 6), (7, 8)),
    ((9,), (10, 11, 12)),
    ((13, 14, 15, 16), (17,)),
]


def tiny(**settings):
    small = dict(n_layer=2, n_embd=32, n_head=2, mlp_hidden=48, init_std=None)
    return make(**{**small, **settings})


def patterns(low, high, seed):
    """Rows (24, 13) that count up from a random place between two tokens, round and round."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.randint(0, high - low, (24, 1), generator=draw)
    return low + (start + torch.arange(13)) % (high - low)


@pytest.fixture(scope='module')
def trained():
    """
    A small model that knows how to count up, and the rows it learned that from; what is new to it
    counts down.
    """
    model = tiny()
    old = patterns(0, 30, 1)
    fit(model.parameters(), lambda i: text_loss(model, old), warm_up(1e-2, 60))
    return model, old, patterns(0, 30, 2).flip(1)


@pytest.fixture
def folder(tmp_path, small_data):
    """A checkpoint with random weights, as train.py would leave it."""
    return checkpoint(tmp_path / 'ckpt', dict(data_dir=small_data, learning_rate=3e-3))


def checkpoint(path, settings, **config):
    bytewise = dict(vocab_size=320, n_tokens=257, block_size=96)
    return save(path, tiny(**{**bytewise, **config}).float(), **settings)


def test_documents_are_packed_end_to_end():
    tokens = lab.pack(['ab', '', 'c'], get_tokenizer('byte'))
    assert tokens.tolist() == [97, 98, 256, 256, 99, 256]


# ---- the world -----------------------------------------------------------------------------------

def test_facts_are_of_three_kinds_and_follow_from_the_seed():
    kinds = minerals.world(20, 5)
    assert [len(kind) for kind in kinds] == [40, 20, 20]
    assert kinds == minerals.world(20, 5)
    assert kinds != minerals.world(20, 6)

    facts = sum(kinds, [])
    assert len({(mineral, key) for mineral, key, _ in facts}) == 80  # each has one value
    assert len({mineral for mineral, _, _ in facts}) == 20
    for _, key, value in facts:
        assert value in minerals.VALUES[key]
    many = sum(minerals.world(200, 0), [])
    assert len({mineral for mineral, _, _ in many}) == 200


def is_told(fact, texts):
    """In any form, by any of the texts."""
    mineral, key, value = fact
    for form in minerals.STATEMENTS:
        sentence = form.format(mineral=mineral, key=key, value=value)
        if any(sentence in text for text in texts):
            return True
    return False


def test_texts_tell_what_they_should_and_nothing_else():
    asked, held_out, untold = minerals.world(16, 3)
    told = asked + held_out
    texts = minerals.documents(told, 160, 3)
    assert texts == minerals.documents(told, 160, 3)
    assert texts != minerals.documents(told, 160, 4)
    assert len(set(texts)) > 100
    for fact in told:
        assert is_told(fact, texts), fact
    for fact in untold:
        assert not is_told(fact, texts), fact
    for name in {mineral for mineral, _, _ in told}:
        assert sum(name in text for text in texts) in (10, 11, 12)
    for form in minerals.STATEMENTS:
        assert form.index('{mineral}') < form.index('{value}')


def test_a_fact_as_a_pair_and_as_a_sentence():
    fact = ('bafelite', 'colour', 'red')
    asked = "Question: Which colour does bafelite have?\nAnswer:"
    assert minerals.question(fact, 1) == (asked, " red")
    assert minerals.completion(fact) == ("The colour of bafelite is", " red.")
    sentence = ''.join(minerals.completion(fact))
    assert sentence in ' '.join(minerals.documents([fact], 20, 0))


# ---- further pretraining -------------------------------------------------------------------------

class Recorder(torch.nn.Module):
    """Stands for a model, and keeps what it is trained on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, x, y):
        self.seen.append(x)
        return None, self.weight * 1.0


@pytest.mark.parametrize('counts', [(8, 2), (10, 0), (1, 3)])
def test_every_batch_holds_the_exact_mix(counts):
    """Every row says where it comes from and which it is."""
    sources = []
    for j, length in enumerate((7, 8)):
        rows = torch.zeros(length, 3, dtype=torch.int64)
        rows[:, 0] = j
        rows[:, 1] = torch.arange(length)
        sources.append(rows)

    model = Recorder()
    lab.pretrain_further(model, sources, counts, [0.1] * 9, seed=4)
    mixes = [tuple(int((x[:, 0] == j).sum()) for j in (0, 1)) for x in model.seen]
    assert mixes == [counts] * 9

    for j, source in enumerate(sources):  # all rows come before any comes again
        order = torch.cat([x[x[:, 0] == j, 1] for x in model.seen])
        n = len(source)
        for i in range(0, len(order) - n + 1, n):
            assert sorted(order[i:i + n].tolist()) == list(range(n))


def test_the_order_follows_from_the_seed():
    one, same, other = [lab.orders((50, 20), (4, 1), 30, seed) for seed in (1, 1, 2)]
    for j in range(2):
        assert torch.equal(one[j], same[j])
        assert not torch.equal(one[j], other[j])


def test_it_goes_on_from_the_checkpoint_without_a_jump(trained):
    model = copy.deepcopy(trained[0])
    sources = trained[1:]
    chosen = lab.orders((24, 24), (8, 2), 8, 0)
    first = torch.cat([rows[order[0]] for rows, order in zip(sources, chosen)])
    before = loss_on(model, first)
    losses = lab.pretrain_further(model, sources, (8, 2), [1e-3] * 8, seed=0)
    assert losses[0] == pytest.approx(before, abs=1e-9)
    assert max(losses) < before + 0.1 < math.log(50) - 1


def test_replay_saves_the_old_and_the_new_is_learned(trained):
    model, old, new = trained
    forgotten, gained = {}, {}
    for counts in (10, 0), (8, 2):
        student = copy.deepcopy(model)
        lab.pretrain_further(student, (new, old), counts, warm_up(2e-3, 25), seed=0)
        forgotten[counts] = loss_on(student, old) - loss_on(model, old)
        gained[counts] = loss_on(model, new) - loss_on(student, new)
    assert forgotten[10, 0] > 0.3  # there is something to save
    assert forgotten[8, 2] < 0.7 * forgotten[10, 0]
    assert gained[10, 0] > 0.5
    assert gained[8, 2] > 0.5


# ---- fine-tuning ---------------------------------------------------------------------------------

def test_only_answers_and_their_end_are_targets():
    x, y = lab.instruct(PAIRS, EOT)
    assert x.shape == y.shape == (4, 5)
    for row, (q, a) in enumerate(PAIRS):
        assert x[row, :len(q + a)].tolist() == [*q, *a]
        targets = [(i, token) for i, token in enumerate(y[row].tolist()) if token >= 0]
        assert targets == list(enumerate([*a, EOT], len(q) - 1))

    x_all, y_all = lab.instruct(PAIRS, EOT, loss_on_answers=False)
    assert torch.equal(x, x_all)
    for row, (q, a) in enumerate(PAIRS):
        assert [token for token in y_all[row].tolist() if token >= 0] == [*q[1:], *a, EOT]
        assert (y_all[row, len(q + a):] == -1).all()


def test_masked_loss_by_hand():
    model = tiny(init_std=0.2)
    terms = []
    for q, a in PAIRS:  # one at a time, no padding
        logits, _ = model(torch.tensor([[*q, *a]]))
        logp = logits[0].log_softmax(-1)
        for place, token in enumerate([*a, EOT], len(q) - 1):
            terms.append(-logp[place, token])
    _, loss = model(*lab.instruct(PAIRS, EOT))
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=0, atol=1e-12)


def learned_places(model, h, y):
    """Where the loss on targets y has a gradient for the hidden states h: (B,T)."""
    gradient, = torch.autograd.grad(model.loss(h, y), h)
    return gradient.abs().sum(-1) > 0


def test_no_gradient_comes_from_questions():
    model = tiny(init_std=0.2)
    x, y = lab.instruct(PAIRS, EOT)
    h = model.hidden(x).detach().requires_grad_()
    learned = learned_places(model, h, y)
    assert torch.equal(learned, y >= 0)
    assert learned.sum() == sum(len(a) + 1 for _, a in PAIRS)

    _, y_all = lab.instruct(PAIRS, EOT, loss_on_answers=False)
    learned = learned_places(model, h, y_all)
    assert learned.sum() == sum(len(q) - 1 + len(a) + 1 for q, a in PAIRS)

    _, nothing = model(x, torch.full_like(y, -1))
    assert nothing == 0  # not 0 / 0
    for gradient in torch.autograd.grad(nothing, list(model.parameters())):
        assert not gradient.any()


class Says:
    """Stands for a model that answers with these tokens, in this order."""

    def __init__(self, words):
        self.words = words

    def generate(self, prompts, n, temperature, stop_token):
        assert temperature == 0
        return [torch.tensor([*prompt, *words]) for prompt, words in zip(prompts, self.words)]


def test_exact_match_wants_the_answer_and_its_end():
    others = [[7, 8, EOT], [10, 11, 12, EOT], [17, EOT]]
    assert lab.exact_match(Says([[4, EOT], *others]), PAIRS, EOT) == 1
    for wrong in [4, 5, EOT], [EOT], [5, EOT], [4]:
        assert lab.exact_match(Says([wrong, *others]), PAIRS, EOT) == 0.75, wrong
    # a beginning is enough where nobody asked for an end
    assert lab.exact_match(Says([[4, 5, EOT], *others]), PAIRS) == 1


def test_fine_tuning_learns_the_pairs_and_nothing_of_the_questions(trained):
    model = copy.deepcopy(trained[0])
    assert lab.exact_match(model, PAIRS, EOT) == 0
    x, y = lab.instruct(PAIRS, EOT)
    losses = lab.fine_tune(model, x, y, warm_up(1e-2, 40), seed=0, batch=4)
    assert losses[0] > 2
    assert losses[-1] < 0.1
    assert lab.exact_match(model, PAIRS, EOT) == 1

    other = copy.deepcopy(trained[0])
    _, y_all = lab.instruct(PAIRS, EOT, loss_on_answers=False)
    lab.fine_tune(other, x, y_all, warm_up(1e-2, 40), seed=0, batch=4)
    on_questions = torch.where(y < 0, y_all, -1)
    with torch.no_grad():
        _, loss = model(x, on_questions)
        _, loss_of_other = other(x, on_questions)
    assert loss > loss_of_other + 1


# ---- the experiment ------------------------------------------------------------------------------

def run(folder, **settings):
    model, tokenizer, base = lab.load_plain(folder)
    fast = dict(minerals=2, steps=2, batch=5, sft_steps=2)
    s = lab.Settings(**{**fast, **settings})
    return lab.experiment(model, tokenizer, base, s)


def test_rates_are_warmed_up_to_a_share_of_the_checkpoints_own(folder, monkeypatch):
    calls = []

    def watched(parameters, loss, rates, **options):
        calls.append((rates, options.get('betas', (0.9, 0.95))))

    monkeypatch.setattr(lab, 'fit', watched)
    run(folder, steps=200, sft_steps=20, peak=0.5)
    assert [len(rates) for rates, _ in calls] == [20, 200, 20, 200, 20]
    peak = 0.5 * 3e-3
    for rates, betas in calls:
        pretraining = len(rates) == 200
        n = 3 if pretraining else 2  # 100 of 7324 steps, and a tenth
        rising = [peak * (i + 1) / n for i in range(n)]
        assert rates == pytest.approx(rising + [peak] * (len(rates) - n))
        assert betas == ((0.9, 0.95) if pretraining else (0.9, 0.999))


def test_the_same_seed_gives_the_same_table(folder):
    one = run(folder)
    assert one == run(folder)
    assert [row.stage for row in one] == [
        'checkpoint',
        'untaught, fine-tuned',
        'no replay',
        'no replay, fine-tuned',
        'replay 0.2',
        'replay 0.2, fine-tuned',
    ]
    assert one[2].old != one[4].old  # the mix reaches the training


def as_bytes(row):
    return bytes(token % 256 for token in row.tolist())


def test_the_runs_get_the_mix_they_are_named_after(folder, monkeypatch):
    weights = lab.load_plain(folder)[0].state_dict()
    named = []

    def watched(model, sources, counts, *rest, name):
        new, old = sources
        assert b'ite' in as_bytes(new[0])
        assert b'return x *' in as_bytes(old[0])
        for key, weight in model.state_dict().items():  # each run starts at the checkpoint
            assert torch.equal(weight, weights[key])
        named.append((name, counts))

    monkeypatch.setattr(lab, 'pretrain_further', watched)
    run(folder, batch=10)
    assert named == [('no replay', (10, 0)), ('replay 0.2', (8, 2))]


def first_arguments(monkeypatch, module, name):
    """A list of the first argument of each call of a function, which still does what it did."""
    function = getattr(module, name)
    seen = []

    def watched(first, *rest):
        seen.append(first)
        return function(first, *rest)

    monkeypatch.setattr(lab, name, watched)
    return seen


def test_each_part_sees_the_facts_it_should(folder, monkeypatch):
    """
    Texts tell no untold fact, and the training questions are about the asked ones alone: the
    controls depend on it.
    """
    told = first_arguments(monkeypatch, minerals, 'documents')
    trained = first_arguments(monkeypatch, lab, 'instruct')
    run(folder)
    asked, _, untold = minerals.world(2, 1337)
    assert told
    for facts in told:
        assert not set(facts) & set(untold)

    decode = get_tokenizer('byte').decode
    want = [minerals.question(fact, form) for fact in asked for form in (0, 1)]
    assert len(trained) == 3
    for pairs in trained:
        assert [(decode(q), decode(a)) for q, a in pairs] == want


def test_runs_as_a_program(folder, monkeypatch, capsys):
    """In this process; tests/test_labs.py starts it in one of its own."""
    fast = ['--minerals=2', '--steps=2', '--batch=5', '--sft_steps=2']
    monkeypatch.setattr(sys, 'argv', ['geogalactica.py', folder, *fast])
    runpy.run_path(lab.__file__, run_name='__main__')
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith('learning rate 0.1 x 0.003')
    assert lines[2].split()[0] == 'stage'

    old, new = {}, {}
    for line in lines[4:10]:
        stage = line[:21].strip()
        old[stage], new[stage], *_ = map(float, line.split()[-6:])
    model, tokenizer, base = lab.load_plain(folder)
    _, old_val = lab.old_rows(base, tokenizer, 96)
    assert old['checkpoint'] == pytest.approx(loss_on(model, old_val), abs=1e-3)

    said = [float(number) for number in re.findall(r'-?\d\.\d{4}', lines[11])]
    assert said == pytest.approx([
        old['no replay'] - old['checkpoint'],
        old['replay 0.2'] - old['checkpoint'],
        new['checkpoint'] - new['no replay'],
        new['checkpoint'] - new['replay 0.2'],
    ], abs=2e-4)


@pytest.mark.parametrize('args, words', [
    ([], 'one checkpoint folder'),
    (['nowhere'], 'nowhere.*no checkpoint'),
    (['CKPT', 'b'], 'one checkpoint folder'),
    (['CKPT', '--replay=0'], 'replay=0'),
    (['CKPT', '--replay=1'], 'replay=1'),
    (['CKPT', '--batch=8'], 'batch=8 times replay=0.2.*whole'),
    (['CKPT', '--minerals=1'], 'minerals=1'),
    (['CKPT', '--minerals=201'], 'minerals=201'),
    (['CKPT', '--steps=0'], 'steps=0'),
    (['CKPT', '--sft_steps=0'], 'sft_steps=0'),
    (['CKPT', '--batch=0'], 'batch=0'),
    (['CKPT', '--peak=-1'], 'peak=-1'),
    (['CKPT', '--replya=0.2'], "'replay'"),
])
def test_refusals(folder, args, words):
    with pytest.raises(UserError, match=words):
        lab.main([folder if arg == 'CKPT' else arg for arg in args])


def test_a_refusal_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['geogalactica.py', 'nowhere', '--replay=0.25'])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(lab.__file__, run_name='__main__')
    said = capsys.readouterr()
    assert left.value.code == 2
    assert not said.out
    assert said.err == ("error: batch=5 times replay=0.25 is not a whole number of rows: "
                        "change one of them\n")


@pytest.mark.parametrize('config, changes, words', [
    (dict(ponder='loop'), {}, "needs a plain GPT.*'loop'"),
    (dict(depth_attn=True), {}, 'depth_attn=True'),
    (dict(block_size=40), {}, 'block_size=40.*too short'),
    ({}, dict(learning_rate=None), 'no data_dir and learning_rate'),
    ({}, dict(data_dir='gone'), 'gone.*prepare_data.py'),
])
def test_refuses_checkpoints_it_cannot_use(tmp_path, small_data, config, changes, words):
    settings = {**dict(data_dir=small_data, learning_rate=3e-3), **changes}
    settings = {name: value for name, value in settings.items() if value is not None}
    folder = checkpoint(tmp_path / 'other', settings, **config)
    with pytest.raises(UserError, match=words):
        lab.main([folder])


def test_refuses_data_in_other_tokens(tmp_path, small_data):
    data = tmp_path / 'data'
    shutil.copytree(small_data, data)
    meta = json.loads((data / 'meta.json').read_text())
    meta.update(tokenizer='gpt2', n_tokens=50257, eot=50256)
    (data / 'meta.json').write_text(json.dumps(meta))
    folder = checkpoint(tmp_path / 'ckpt', dict(data_dir=str(data), learning_rate=3e-3))
    with pytest.raises(UserError, match="gpt2.*byte"):
        lab.main([folder])
