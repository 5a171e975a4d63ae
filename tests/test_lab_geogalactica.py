"""exercises/labs/geogalactica.py: the mix is exact, only answers are learned, replay saves what it should, controls stay at chance."""
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
from conftest import ROOT, make, program, save

sys.path.insert(0, os.path.join(ROOT, 'exercises', 'labs'))
import geogalactica as lab
import minerals
from common import fit, loss_on, warm_up
from engine.errors import UserError
from engine.shards import get_tokenizer

EOT = 49  # in models with n_tokens=50
PAIRS = [((1, 2, 3), (4,)), ((5, 6), (7, 8)), ((9,), (10, 11, 12)), ((13, 14, 15, 16), (17,))]


def tiny(**settings):
    return make(**{**dict(n_layer=2, n_embd=32, n_head=2, mlp_hidden=48, init_std=None), **settings})


def patterns(low, high, seed):
    """Rows (24, 13) that count up from a random place between two tokens, round and round."""
    start = torch.randint(0, high - low, (24, 1), generator=torch.Generator().manual_seed(seed))
    return low + (start + torch.arange(13)) % (high - low)


@pytest.fixture(scope='module')
def trained():
    """A small model that knows how to count up, and the rows it learned that from; what is new to it counts down."""
    model, old = tiny(), patterns(0, 30, 1)
    fit(model.parameters(), lambda i: model(old[:, :-1], old[:, 1:])[1], warm_up(1e-2, 60))
    return model, old, patterns(0, 30, 2).flip(1)


@pytest.fixture
def folder(tmp_path, small_data):
    """A checkpoint with random weights, as train.py would leave it."""
    return checkpoint(tmp_path / 'ckpt', dict(data_dir=small_data, learning_rate=3e-3))


def checkpoint(path, settings, **config):
    model = tiny(**{**dict(vocab_size=320, n_tokens=257, block_size=96), **config}).float()
    return save(path, model, **settings)


def test_documents_are_packed_end_to_end():
    assert lab.pack(['ab', '', 'c'], get_tokenizer('byte')).tolist() == [97, 98, 256, 256, 99, 256]


# ---- the world

def test_facts_are_of_three_kinds_and_follow_from_the_seed():
    kinds = minerals.world(20, 5)
    assert [len(kind) for kind in kinds] == [40, 20, 20] and kinds == minerals.world(20, 5) != minerals.world(20, 6)
    facts = sum(kinds, [])
    assert len({fact[:2] for fact in facts}) == 80 and len({fact[0] for fact in facts}) == 20  # one value for each mineral and key
    assert all(value in minerals.VALUES[key] for _, key, value in facts)
    assert len({fact[0] for fact in sum(minerals.world(200, 0), [])}) == 200


def test_texts_tell_what_they_should_and_nothing_else():
    asked, held_out, untold = minerals.world(16, 3)
    texts = minerals.documents(asked + held_out, 160, 3)
    assert texts == minerals.documents(asked + held_out, 160, 3) != minerals.documents(asked + held_out, 160, 4)
    assert len(set(texts)) > 100
    said = {(mineral, key, value) for text in texts for mineral, key, value in asked + held_out + untold
            for form in minerals.STATEMENTS if form.format(mineral=mineral, key=key, value=value) in text}
    assert said == set(asked + held_out)
    for name in {fact[0] for fact in asked + held_out}: assert sum(name in text for text in texts) in (10, 11, 12)
    for form in minerals.STATEMENTS: assert form.index('{mineral}') < form.index('{value}')


def test_a_fact_as_a_pair_and_as_a_sentence():
    fact = ('bafelite', 'colour', 'red')
    assert minerals.question(fact, 1) == ("Question: Which colour does bafelite have?\nAnswer:", " red")
    assert minerals.completion(fact) == ("The colour of bafelite is", " red.")
    assert ''.join(minerals.completion(fact)) in ' '.join(minerals.documents([fact], 20, 0))


# ---- further pretraining

@pytest.mark.parametrize('counts', [(8, 2), (10, 0), (1, 3)])
def test_every_batch_holds_the_exact_mix(counts):
    """Every row says where it comes from and which it is."""
    sources, seen = [torch.tensor([[j, row, 0]]).expand(7 + j, 3).clone() for j, row in ((0, 0), (1, 0))], []
    for source in sources: source[:, 1] = torch.arange(len(source))
    weight = torch.nn.Parameter(torch.ones(()))

    class Model(torch.nn.Module):
        def forward(self, x, y):
            seen.append(x)
            return None, weight * 1.0
    model = Model()
    model.weight = weight
    lab.pretrain_further(model, sources, counts, [0.1] * 9, seed=4)
    assert [tuple(int((x[:, 0] == j).sum()) for j in (0, 1)) for x in seen] == [counts] * 9
    for j, n in enumerate(counts):  # all rows come before any comes again
        order = torch.cat([x[x[:, 0] == j, 1] for x in seen])
        for i in range(0, len(order) - len(sources[j]) + 1, len(sources[j])):
            assert sorted(order[i:i + len(sources[j])].tolist()) == list(range(len(sources[j])))


def test_the_order_follows_from_the_seed():
    one, same, other = (lab.orders((50, 20), (4, 1), 30, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same)) and not any(torch.equal(a, b) for a, b in zip(one, other))


def test_it_goes_on_from_the_checkpoint_without_a_jump(trained):
    model, sources = copy.deepcopy(trained[0]), trained[1:]
    first = torch.cat([rows[order[0]] for rows, order in zip(sources, lab.orders((24, 24), (8, 2), 8, 0))])
    before = loss_on(model, first)
    losses = lab.pretrain_further(model, sources, (8, 2), [1e-3] * 8, seed=0)
    assert losses[0] == pytest.approx(before, abs=1e-9) and max(losses) < before + 0.1 < math.log(50) - 1


def test_replay_saves_the_old_and_the_new_is_learned(trained):
    model, old, new = trained
    after = {}
    for counts in (10, 0), (8, 2):
        student = copy.deepcopy(model)
        lab.pretrain_further(student, (new, old), counts, warm_up(2e-3, 25), seed=0)
        after[counts] = loss_on(student, old), loss_on(student, new)
    before = loss_on(model, old), loss_on(model, new)
    assert after[10, 0][0] > before[0] + 0.3                                        # there is something to save
    assert after[8, 2][0] - before[0] < 0.7 * (after[10, 0][0] - before[0])
    for _, gained in after.values(): assert gained < before[1] - 0.5


# ---- fine-tuning

def test_only_answers_and_their_end_are_targets():
    x, y = lab.instruct(PAIRS, EOT)
    assert x.shape == y.shape == (4, 5)
    for row, (q, a) in enumerate(PAIRS):
        assert x[row, :len(q + a)].tolist() == [*q, *a]
        assert [(i, t) for i, t in enumerate(y[row].tolist()) if t >= 0] == [*enumerate([*a, EOT], len(q) - 1)]
    x_all, y_all = lab.instruct(PAIRS, EOT, loss_on_answers=False)
    assert torch.equal(x, x_all)
    for row, (q, a) in enumerate(PAIRS):
        assert [t for t in y_all[row].tolist() if t >= 0] == [*q[1:], *a, EOT] and (y_all[row, len(q + a):] == -1).all()


def test_masked_loss_by_hand_and_no_gradient_from_questions():
    model = tiny(init_std=0.2)
    x, y = lab.instruct(PAIRS, EOT)
    terms = []
    for q, a in PAIRS:  # one at a time, no padding
        logp = model(torch.tensor([[*q, *a]]))[0][0].log_softmax(-1)
        terms += [-logp[len(q) - 1 + i, token] for i, token in enumerate([*a, EOT])]
    torch.testing.assert_close(model(x, y)[1], torch.stack(terms).mean(), rtol=0, atol=1e-12)
    h = model.hidden(x).detach().requires_grad_()
    model.loss(h, y).backward()
    learned = h.grad.abs().sum(-1) > 0                                              # (B,T)
    assert torch.equal(learned, y >= 0) and learned.sum() == sum(len(a) + 1 for _, a in PAIRS)
    h.grad = None
    model.loss(h, lab.instruct(PAIRS, EOT, loss_on_answers=False)[1]).backward()
    assert (h.grad.abs().sum(-1) > 0).sum() == sum(len(q) - 1 + len(a) + 1 for q, a in PAIRS)
    nothing = model(x, torch.full_like(y, -1))[1]                                   # 0, not 0 / 0
    assert nothing == 0 and not any(g.any() for g in torch.autograd.grad(nothing, list(model.parameters())))


def test_exact_match_wants_the_answer_and_its_end():
    class Says:
        def generate(self, prompts, n, temperature, stop_token):
            assert temperature == 0
            return [torch.tensor([*p, *words]) for p, words in zip(prompts, self.words)]
    model = Says()
    model.words = [[4, EOT], [7, 8, EOT], [10, 11, 12, EOT], [17, EOT]]
    assert lab.exact_match(model, PAIRS, EOT) == 1
    for wrong in [4, 5, EOT], [EOT], [5, EOT], [4]:
        model.words[0] = wrong
        assert lab.exact_match(model, PAIRS, EOT) == 0.75, wrong
    model.words[0] = [4, 5, EOT]
    assert lab.exact_match(model, PAIRS) == 1  # a beginning is enough where nobody asked for an end


def test_fine_tuning_learns_the_pairs_and_nothing_of_the_questions(trained):
    model = copy.deepcopy(trained[0])
    assert lab.exact_match(model, PAIRS, EOT) == 0
    losses = lab.fine_tune(model, *lab.instruct(PAIRS, EOT), warm_up(1e-2, 40), seed=0, batch=4)
    assert losses[0] > 2 and losses[-1] < 0.1 and lab.exact_match(model, PAIRS, EOT) == 1
    other = copy.deepcopy(trained[0])
    x, y = lab.instruct(PAIRS, EOT, loss_on_answers=False)
    lab.fine_tune(other, x, y, warm_up(1e-2, 40), seed=0, batch=4)
    with torch.no_grad(): on_questions = [m(x, torch.where(lab.instruct(PAIRS, EOT)[1] < 0, y, -1))[1].item() for m in (model, other)]
    assert on_questions[0] > on_questions[1] + 1


# ---- the experiment

def run(folder, **settings):
    model, tokenizer, base = lab.load_plain(folder)
    s = lab.Settings(**{**dict(minerals=2, steps=2, batch=5, sft_steps=2), **settings})
    return lab.experiment(model, tokenizer, base, s)


def test_rates_are_warmed_up_to_a_share_of_the_checkpoints_own(folder, monkeypatch):
    rates = []
    monkeypatch.setattr(lab, 'fit', lambda parameters, loss, given, **options: rates.append((given, options)))
    run(folder, steps=200, sft_steps=20, peak=0.5)
    peak = 0.5 * 3e-3
    assert [len(given) for given, _ in rates] == [20, 200, 20, 200, 20]
    for given, options in rates:
        n = 3 if len(given) == 200 else 2  # 100 of 7324 steps, and a tenth
        assert given == pytest.approx([peak * (i + 1) / n for i in range(n)] + [peak] * (len(given) - n))
        assert options.get('betas', (0.9, 0.95)) == ((0.9, 0.95) if len(given) == 200 else (0.9, 0.999))


def test_the_same_seed_gives_the_same_table(folder):
    one = run(folder)
    assert one == run(folder)
    assert [row[0] for row in one] == ['checkpoint', 'untaught, fine-tuned', 'no replay', 'no replay, fine-tuned', 'replay 0.2',
                                       'replay 0.2, fine-tuned']
    assert one[2][1] != one[4][1]  # the mix reaches the training


def test_the_runs_get_the_mix_they_are_named_after(folder, monkeypatch):
    got = []
    monkeypatch.setattr(lab, 'pretrain_further', lambda model, sources, counts, *rest, name: got.append(
        (name, sources, counts, copy.deepcopy(model.state_dict()))))
    run(folder, batch=10)
    checkpoint = lab.load_plain(folder)[0].state_dict()
    assert [(name, counts) for name, _, counts, _ in got] == [('no replay', (10, 0)), ('replay 0.2', (8, 2))]
    for _, (new, old), _, weights in got:
        assert all(torch.equal(weights[key], checkpoint[key]) for key in checkpoint)  # each run starts at the checkpoint
        assert b'ite' in bytes(t % 256 for t in new[0].tolist()) and b'return x *' in bytes(t % 256 for t in old[0].tolist())


def test_each_part_sees_the_facts_it_should(folder, monkeypatch):
    """Texts tell no untold fact, and the training questions are about the asked ones alone: the controls depend on it."""
    seen = {}
    spy = lambda name: (lambda *args: (seen.setdefault(name, []).append(args[0]), getattr(minerals, name)(*args))[1])
    for name in ('documents', 'question'): monkeypatch.setattr(lab, name, spy(name))
    trained = []
    monkeypatch.setattr(lab, 'instruct', lambda pairs, *rest, instruct=lab.instruct: (trained.append(pairs), instruct(pairs, *rest))[1])
    run(folder)
    asked, held_out, untold = minerals.world(2, 1337)
    for facts in seen['documents']: assert not set(facts) & set(untold)
    byte = get_tokenizer('byte')
    want = [minerals.question(fact, form) for fact in asked for form in (0, 1)]
    assert len(trained) == 3
    for pairs in trained: assert [tuple(map(byte.decode, pair)) for pair in pairs] == want


def test_runs_as_a_program(folder):
    done = program('exercises/labs/geogalactica.py', folder, '--minerals=2', '--steps=2', '--batch=5', '--sft_steps=2')
    lines = done.stdout.splitlines()
    assert lines[0].startswith('learning rate 0.1 x 0.003') and lines[2].split()[0] == 'stage'
    numbers = {line[:21].strip(): [float(word) for word in line.split()[-6:]] for line in lines[4:10]}
    model, tokenizer, base = lab.load_plain(folder)
    assert numbers['checkpoint'][0] == pytest.approx(loss_on(model, lab.old_rows(base, tokenizer, 96)[1]), abs=1e-3)
    said = [float(n) for n in re.findall(r'-?\d\.\d{4}', lines[11])]
    old, new = ([numbers[stage][i] for stage in ('checkpoint', 'no replay', 'replay 0.2')] for i in (0, 1))
    assert said == pytest.approx([old[1] - old[0], old[2] - old[0], new[0] - new[1], new[0] - new[2]], abs=2e-4)


@pytest.mark.parametrize('args, words', [
    ([], 'one checkpoint folder'), (['nowhere'], 'nowhere.*no checkpoint'), (['CKPT', 'b'], 'one checkpoint folder'),
    (['CKPT', '--replay=0'], 'replay=0'), (['CKPT', '--replay=1'], 'replay=1'), (['CKPT', '--batch=8'], 'batch=8 times replay=0.2.*whole'),
    (['CKPT', '--minerals=1'], 'minerals=1'), (['CKPT', '--minerals=201'], 'minerals=201'), (['CKPT', '--steps=0'], 'steps=0'),
    (['CKPT', '--sft_steps=0'], 'sft_steps=0'), (['CKPT', '--batch=0'], 'batch=0'), (['CKPT', '--peak=-1'], 'peak=-1'),
    (['CKPT', '--replya=0.2'], "'replay'")])
def test_refusals(folder, args, words):
    with pytest.raises(UserError, match=words): lab.main([folder if arg == 'CKPT' else arg for arg in args])


def test_a_refusal_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['geogalactica.py', 'nowhere', '--replay=0.25'])
    with pytest.raises(SystemExit) as left: runpy.run_path(lab.__file__, run_name='__main__')
    said = capsys.readouterr()
    assert left.value.code == 2 and not said.out
    assert said.err == "error: batch=5 times replay=0.25 is not a whole number of rows: change one of them\n"


@pytest.mark.parametrize('config, settings, words', [
    (dict(ponder='loop'), {}, "needs a plain GPT.*'loop'"), (dict(depth_attn=True), {}, 'depth_attn=True'),
    (dict(block_size=40), {}, 'block_size=40.*too short'), ({}, dict(learning_rate=None), 'no data_dir and learning_rate'), ({}, dict(data_dir='gone'), 'gone.*prepare_data.py')])
def test_refuses_checkpoints_it_cannot_use(tmp_path, small_data, config, settings, words):
    settings = {k: v for k, v in {**dict(data_dir=small_data, learning_rate=3e-3), **settings}.items() if v is not None}
    with pytest.raises(UserError, match=words): lab.main([checkpoint(tmp_path / 'other', settings, **config)])


def test_refuses_data_in_other_tokens(tmp_path, small_data):
    shutil.copytree(small_data, tmp_path / 'data')
    meta = json.loads((tmp_path / 'data' / 'meta.json').read_text())
    (tmp_path / 'data' / 'meta.json').write_text(json.dumps({**meta, 'tokenizer': 'gpt2'}))
    folder = checkpoint(tmp_path / 'ckpt', dict(data_dir=str(tmp_path / 'data'), learning_rate=3e-3))
    with pytest.raises(UserError, match="gpt2.*byte"): lab.main([folder])
