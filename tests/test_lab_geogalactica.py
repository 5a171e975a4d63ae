"""
exercises/labs/geogalactica.py: the mix is exact, only answers are learned, each part sees the facts
it should.
"""
import re
from unittest import mock

import pytest
import torch
from conftest import make, save

import common
import geogalactica as lab
import minerals
from common import loss_on, own_text, windows
from engine.files import UserError
from engine.shards import get_tokenizer

EOT = 49  # in models with n_tokens=50
PAIRS = [
    ([1, 2, 3], [4, EOT]),
    ([5, 6], [7, 8, EOT]),
    ([9], [10, 11, 12, EOT]),
    ([13, 14, 15, 16], [17, EOT]),
]


def is_told(fact, texts):
    """In any form, by any of the texts."""
    sentences = [minerals.statement(fact, form).encode() for form in minerals.STATEMENTS]
    return any(sentence in text for sentence in sentences for text in texts)


def test_texts_tell_what_they_should_and_nothing_else():
    asked, held_out, untold = minerals.world(16, 3)
    assert [len(facts) for facts in (asked, held_out, untold)] == [32, 16, 16]
    texts = minerals.documents(asked + held_out, 160, 3)
    for fact in asked + held_out:
        assert is_told(fact, texts), fact
    for fact in untold:
        assert not is_told(fact, texts), fact
    fact = ('bafelite', 'colour', 'red')
    assert ''.join(minerals.completion(fact)) == minerals.statement(fact, minerals.STATEMENTS[0])


class Recorder(torch.nn.Module):
    """Stands for a model, and keeps what it is trained on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, x, y):
        self.seen.append(x)
        return None, self.weight * 1.0


def test_every_batch_holds_the_exact_mix():
    """Every row says where it comes from and which it is; all come before any comes again."""
    sources = []
    for j, length in enumerate((7, 8)):
        rows = torch.zeros(length, 3, dtype=torch.int64)
        rows[:, 0] = j
        rows[:, 1] = torch.arange(length)
        sources.append(rows)
    model = Recorder()
    lab.pretrain_further('', model, sources, (8, 2), 0.1, lab.Settings(steps=9))
    mixes = [tuple(int((x[:, 0] == j).sum()) for j in (0, 1)) for x in model.seen]
    assert mixes == [(8, 2)] * 9
    for j, source in enumerate(sources):
        n = len(source)
        order = torch.cat([x[x[:, 0] == j, 1] for x in model.seen])
        for visited in order[:len(order) // n * n].split(n):
            assert sorted(visited.tolist()) == list(range(n))


def test_only_answers_and_their_ends_count():
    """Against sums by hand, one pair at a time and without padding."""
    model = make()
    terms = []
    for asked, answer in PAIRS:
        logits, _ = model(torch.tensor([asked + answer]))
        logp = logits[0].log_softmax(-1)
        for place, token in enumerate(answer, len(asked) - 1):
            terms.append(-logp[place, token])
    _, loss = model(*lab.instruct(PAIRS))
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=0, atol=1e-12)
    _, everything = lab.instruct(PAIRS, loss_on_answers=False)
    for row, (asked, answer) in zip(everything.tolist(), PAIRS):
        assert [token for token in row if token >= 0] == asked[1:] + answer


def test_exact_match_wants_the_answer_and_its_end(monkeypatch):
    others = [answer for _, answer in PAIRS[1:]]
    for first, share in (([4, EOT, 3], 1), ([4, 5, EOT], 0.75), ([EOT, 4, EOT], 0.75)):
        said = [first, *others]
        rows = [torch.tensor(q + a) for (q, _), a in zip(PAIRS, said)]
        monkeypatch.setattr(lab, 'generate', mock.Mock(return_value=rows))
        assert lab.exact_match(None, PAIRS) == share, first


def test_the_program(tmp_path, small_data, monkeypatch, capsys):
    """
    Texts tell no untold fact, training asks for the asked ones alone, the first row of the table is
    the checkpoint's.
    """
    small = dict(n_layer=2, vocab_size=320, n_tokens=257, block_size=96)
    folder = save(tmp_path / 'ckpt', make(**small), data_dir=small_data, learning_rate=3e-3)
    documents, instruct = mock.Mock(wraps=lab.documents), mock.Mock(wraps=lab.instruct)
    monkeypatch.setattr(lab, 'documents', documents)
    monkeypatch.setattr(lab, 'instruct', instruct)
    lab.main([folder, '--minerals=2', '--steps=2', '--sft_steps=2'])
    out = capsys.readouterr().out

    asked, held_out, untold = minerals.world(2, 1337)
    for call in documents.call_args_list:
        assert set(call.args[0]) == set(asked + held_out)
    decode = get_tokenizer('byte').decode
    for call in instruct.call_args_list:
        assert [(decode(q), decode(a[:-1])) for q, a in call.args[0]] == [
            minerals.question(fact, form) for fact in asked for form in (0, 1)]

    rows = re.findall(r'^\| (\w.*?) +\| +(\d\S+) \| +(\d\S+)', out, re.M)
    assert [stage for stage, _, _ in rows] == [
        'checkpoint', 'untaught, fine-tuned', 'no replay', 'no replay, fine-tuned', 'replay',
        'replay, fine-tuned']
    model, tokenizer, base = lab.load_plain(folder)
    old = windows(own_text(base, 'val', 2 ** 21, tokenizer), 96)
    want = loss_on(model, old[::max(1, len(old) // 64)][:64])
    assert float(rows[0][1]) == pytest.approx(want, abs=1e-3)

    with monkeypatch.context() as patch:
        patch.setattr(common, 'task_of', lambda meta: ('addition', 4))
        with pytest.raises(UserError, match='is a made task: take a checkpoint of a text'):
            lab.main([folder, '--minerals=2', '--steps=2', '--sft_steps=2'])
    with pytest.raises(UserError, match='batch=8 times replay=0.2 must be a whole'):
        lab.main([folder, '--batch=8'])
