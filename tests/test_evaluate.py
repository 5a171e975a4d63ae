"""tools/evaluate.py: its numbers against plain loops; right answers are in test_tasks.py."""
import codecs
import json
import math
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import cells, make, save, slow_but

import prepare_data
import sample
from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.files import UserError
from engine.shards import MAGIC, VERSION, get_tokenizer, open_shard, read_meta
from engine.tasks import TASKS
from engine.windows import Windows
from tools import evaluate

BYTE = get_tokenizer('byte')
SMALL = dict(vocab_size=320, n_tokens=257, block_size=24)


def log_p(model, tokens):
    """log p (T,V) of what follows each of a few tokens."""
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0][0].double().log_softmax(-1)


def plain_loop(model, tokens):
    """Total nats: window after window, one at a time."""
    T = model.config.block_size
    total = 0.0
    for first in range(0, len(tokens) - 1, T):
        window = [int(token) for token in tokens[first:first + T + 1]]
        for row, target in zip(log_p(model, window[:-1]), window[1:]):
            total -= row[target].item()
    return total


@pytest.fixture
def model():
    return make(**SMALL, depth_attn=True).float()


@pytest.fixture
def folder(tmp_path, model, small_data):
    return save(tmp_path / 'ckpt', model, data_dir=small_data)


# ---- loss on texts -------------------------------------------------------------------------------

@pytest.mark.parametrize('ponder', ['none', 'chain'])
@pytest.mark.parametrize('n', [2, 24, 25, 130])
def test_equals_the_plain_loop(ponder, n):
    model = make(**SMALL, ponder=ponder, ponder_steps=1)
    tokens = np.random.default_rng(n).integers(0, 257, n).astype(np.uint16)
    want = plain_loop(model, tokens) / (n - 1)
    for batch_size in (1, 4):
        got = evaluate.nats(model, tokens, batch_size) / (n - 1)
        assert got == pytest.approx(want, abs=1e-9)
    got = evaluate.nats(model.float(), tokens, 4) / (n - 1)
    assert got == pytest.approx(want, rel=1e-6)
    assert evaluate.nats(model, tokens[:1], 4) == 0.0


def run(capsys, *args):
    """The cells that the program printed, but for the text's name: [[..], ..], by line."""
    evaluate.main([*map(str, args), '--device=cpu'])
    return [row[1:] for row in cells(capsys.readouterr().out)[1:]]


@pytest.mark.parametrize('ponder', ['latent', 'feedback'])
def test_what_iteration_approximates_is_had_token_by_token(ponder, tmp_path, capsys):
    model = make(**SMALL, ponder=ponder, ponder_steps=2 if ponder == 'latent' else 23)
    tokens = np.random.default_rng(0).integers(0, 257, 60).astype(np.uint16)
    want = evaluate.nats(model, tokens, 4)      # with enough sweeps
    model.config.jacobi_iters = 0
    model.config.ponder_steps = 2
    assert abs(evaluate.nats(model, tokens, 4) - want) > 0.1
    assert evaluate.nats(model, tokens, 4, exact=True) == pytest.approx(want, abs=1e-9)

    (tmp_path / 'a.txt').write_bytes(bytes(tokens[tokens < 128].tolist()))
    out = str(save(tmp_path / 'out', model.float(), data_dir='nowhere'))
    for option, how in (([], 'by iteration (--exact=True'), (['--exact=True'], 'token by token')):
        evaluate.main([out, str(tmp_path / 'a.txt'), *option])
        assert f'{ponder}: texts and prompts are read {how}' in capsys.readouterr().out


def test_each_row_of_a_text_is_of_a_model_of_so_many_passes(tmp_path, capsys):
    (tmp_path / 'a.txt').write_text('some text ' * 9)
    model = make(**SMALL, ponder='loop', ponder_steps=2).float()
    out = str(save(tmp_path / 'out', model, data_dir='nowhere'))
    tokens = np.array([256, *b'some text ' * 9], np.uint16)
    want = []
    for model.config.ponder_steps in (0, 2):
        want.append(f'{evaluate.nats(model, tokens, 4) / (len(tokens) - 1):.4f}')
    told = run(capsys, out, tmp_path / 'a.txt', '--ponder_steps=0,2')
    assert [row[2] for row in told] == want and want[0] != want[1]


def test_a_text(model, folder, tmp_path, capsys):
    path = tmp_path / 'text.py'
    text = 'x = "é"\n' * 9
    path.write_text(text, encoding='utf-8')
    n = len(text.encode())
    want = plain_loop(model, [256, *text.encode()]) / n     # the first byte follows an end-of-text
    bits = want / math.log(2)
    [row] = run(capsys, folder, path)
    assert row == ['0', f'{n}', f'{want:.4f}', f'{math.exp(want):.3f}', f'{bits:.4f}']
    [half] = run(capsys, folder, path, '--dtype=bfloat16')
    assert half[2] != row[2] and float(half[2]) == pytest.approx(want, rel=0.02)


def test_a_shard_and_a_folder(model, folder, small_data, capsys):
    # the default is the validation set of the checkpoint's data
    shard = os.path.join(small_data, read_meta(small_data)['val']['shards'][0]['name'])
    of_folder, of_shard = run(capsys, folder, small_data, shard, '--tokens=1000')
    of_default = run(capsys, folder, '--tokens=1000')[0]
    assert of_folder == of_shard == of_default

    tokens = open_shard(shard)[:1000]
    want = plain_loop(model, tokens)
    size = int((tokens[1:] < 256).sum())    # its end-of-text tokens are tokens, but no bytes
    assert size < 999
    _, count, per_token, _, bits_per_byte = of_folder
    assert count == '999'
    assert float(per_token) == pytest.approx(want / 999, abs=6e-5)
    assert float(bits_per_byte) == pytest.approx(want / size / math.log(2), abs=6e-5)


def test_a_shard_without_its_folder_is_told(folder, small_data, tmp_path, capsys):
    path = tmp_path / 'alone.bin'
    shutil.copy(os.path.join(small_data, 'val_000000.bin'), path)
    evaluate.main([folder, str(path), '--tokens=100'])
    assert 'alone.bin: a shard without its folder' in capsys.readouterr().err


def test_a_shard_that_is_written_over_while_it_is_read(model, small_data, tmp_path, capsys,
                                                       monkeypatch):
    """It is a map of the file: the loss would be that of half of either."""
    data = shutil.copytree(small_data, tmp_path / 'data')
    [shard] = data.glob('val*.bin')
    folder = save(tmp_path / 'ckpt', model, data_dir=str(data))
    want = run(capsys, folder, '--tokens=100')

    def meanwhile(*args, nats=evaluate.nats, **options):
        with open(shard, 'r+b') as f:       # as cp does
            f.seek(1024)
            f.write(bytes(200))
        return nats(*args, **options)

    monkeypatch.setattr(evaluate, 'nats', meanwhile)
    assert run(capsys, folder, '--tokens=100') == want


def test_another_validation_set_in_the_place_of_its_own_is_refused(model, tmp_path, small_data,
                                                                   capsys):
    other = shutil.copytree(small_data, tmp_path / 'other')
    meta = read_meta(str(other))
    folder = save(tmp_path / 'ckpt', model, data_dir=str(other))
    state = load_checkpoint(folder)
    save_checkpoint(folder, {**state, 'val_data': meta['val'], 'exam': None})
    evaluate.main([folder, '--tokens=50', '--device=cpu'])
    assert 'warning' not in capsys.readouterr().err
    prepare_data.write_dataset(str(other), [b'text %d' % i for i in range(90)], BYTE, 0.2, 'test')
    with pytest.raises(UserError, match='not the data that this model was trained on'):
        evaluate.main([folder, '--tokens=50', '--device=cpu'])
    evaluate.main([folder, str(other), '--tokens=50', '--device=cpu'])      # asked for
    assert 'it may hold what the model was trained on' in capsys.readouterr().err


@pytest.mark.parametrize('task', slow_but(['addition'], TASKS))
def test_of_a_made_task_answers_alone_count(task, tmp_path, capsys):
    """In its folder and its shards; the same number as train.py's."""
    data = str(tmp_path / 'd')
    prepare_data.prepare_task(prepare_data.DataSettings(problems=300, size=3), task, data)
    model = make(**{**SMALL, 'block_size': 64}).float()
    folder = save(tmp_path / 'ckpt', model, data_dir=data)
    shards = [os.path.join(data, f'{split}_000000.bin') for split in ('val', 'train')]
    of_folder, of_val, of_train = run(capsys, folder, data, *shards)
    assert of_folder == of_val != of_train
    os.link(shards[0], os.path.join(data, 'renamed.txt'))
    assert run(capsys, folder, os.path.join(data, 'renamed.txt')) == [of_val]
    whole = read_meta(data)['val']['tokens']
    assert int(of_folder[1]) < 0.7 * whole

    windows = Windows(data, 'val', read_meta(data), 64)
    x, y = windows.get(range(windows.n), torch.device('cpu'))
    want = model(x, y)[1].item()
    limit = windows.n * 64 + 1
    *_, count, per_token, _, bits = run(capsys, folder, data, f'--tokens={limit}')[0]
    assert int(count) == (y >= 0).sum()
    assert float(per_token) == pytest.approx(want, abs=1e-4)
    assert float(bits) == pytest.approx(want / math.log(2), abs=1e-4)


def test_a_folder_that_is_named_asks_its_own_problems(tmp_path, capsys):
    folders = []
    for size in 2, 3:
        folders.append(str(tmp_path / f'd{size}'))
        made = prepare_data.DataSettings(problems=300, size=size)
        prepare_data.prepare_task(made, 'addition', folders[-1])
    model = make(**{**SMALL, 'block_size': 64}).float()
    folder = save(tmp_path / 'ckpt', model, data_dir=folders[0])
    capsys.readouterr()
    for asked, title, longest in (([], 'addition: ', '2'),
                                  (folders[1:], f'addition of {folders[1]}: ', '3')):
        evaluate.main([folder, *asked, '--answers=20', '--device=cpu'])
        _, told = capsys.readouterr().out.split(title)
        assert cells(told)[0][-1] == longest
    evaluate.main([folder, '--tokens=90', '--device=cpu'])      # of its text, and no answers
    [[_, count, *_]] = cells(capsys.readouterr().out)[1:]
    assert int(count) <= 90


class Mangling:
    """A tokenizer that reads U+FFFD where bytes are no UTF-8, a character a token."""
    name, n_vocab, eot_token = 'mangling', 257, 256

    def encode_to_numpy(self, text, disallowed_special=()):
        return np.array([min(ord(letter), 255) for letter in text], np.uint16)

    def decode_single_token_bytes(self, token):
        return '\ufffd'.encode() if token == 255 else bytes([token])


def test_a_shard_in_the_place_of_another_is_refused(folder, small_data, tmp_path):
    """Its bytes, which bits are per, are those of the one before."""
    shutil.copytree(small_data, tmp_path / 'd')
    shutil.copy(tmp_path / 'd' / 'train_000000.bin', tmp_path / 'd' / 'val_000000.bin')
    with pytest.raises(UserError, match='val_000000.bin: damaged, or another file'):
        evaluate.main([folder, str(tmp_path / 'd'), '--device=cpu'])


def evaluated(model, tokenizer, path, settings):
    arrays = evaluate.token_arrays(path, tokenizer)
    return evaluate.evaluate_text(model, tokenizer, path, arrays, settings)


def test_what_is_wrong_shows_before_anything_is_computed_and_what_is_done_stays(
        folder, tmp_path, monkeypatch, capsys):
    for name in 'ab':
        (tmp_path / name).write_text('def f(x): return x\n')
    (tmp_path / 'c.json').write_text('{}')
    texts = [str(tmp_path / name) for name in ('a', 'b', 'c.json')]
    calls = []

    def stopped(model, tokens, *args, nats=evaluate.nats, **options):
        calls.append(tokens)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return nats(model, tokens, *args, **options)

    monkeypatch.setattr(evaluate, 'nats', stopped)
    with pytest.raises(UserError, match='c.json: records or JSON'):
        evaluate.main([folder, *texts, '--device=cpu'])
    assert not calls
    with pytest.raises(KeyboardInterrupt):
        evaluate.main([folder, *texts[:2], '--device=cpu'])
    told = capsys.readouterr().out
    assert texts[0] in told and texts[1] not in told


def test_a_file_of_utf_16_is_no_text(tmp_path, capsys):
    for encoding in ('utf-8', 'utf-16'):
        path = tmp_path / 'text.txt'
        path.write_text('def f(x): return x\n', encoding=encoding)
        evaluate.read_text(str(path), get_tokenizer('byte'))
        assert ('text.txt has NUL bytes' in capsys.readouterr().err) == (encoding == 'utf-16')


def test_a_byte_order_mark_is_no_text(tmp_path):
    """prepare_data.py leaves it out, too; some editors on Windows begin a file with it."""
    path = tmp_path / 'text.txt'
    path.write_bytes(codecs.BOM_UTF8 + b'def f(x): return x\n')
    tokens = evaluate.read_text(str(path), get_tokenizer('byte'))
    assert bytes(tokens[1:].tolist()) == b'def f(x): return x\n'
    assert evaluate.about(str(path)) == (19, None)
    assert sample.read_start(f'FILE:{path}') == b'def f(x): return x\n'


def test_bits_per_byte_are_of_the_files_bytes(model, tmp_path, capsys):
    """Whatever the tokenizer made of them, and as in train.py: a Latin-1 text in three ways."""
    text = 'caf\xe9 cr\xe8me br\xfbl\xe9e\n'.encode('latin-1') * 9
    path = tmp_path / 'text.txt'
    path.write_bytes(text)
    data = str(tmp_path / 'd')
    texts = [text + b'%d' % i for i in range(40)]
    prepare_data.write_dataset(data, texts, Mangling(), 0.3, 'test')
    settings = evaluate.EvaluateSettings()

    count, per_token, per_byte, _ = evaluated(model, Mangling(), str(path), settings)
    assert count == len(text) + 1 - 1
    assert 'text.txt is no UTF-8' in capsys.readouterr().err
    assert per_byte == pytest.approx(per_token)         # a token is a byte of the file
    val = read_meta(data)['val']
    shard = os.path.join(data, 'val_000000.bin')
    for limit in (None, 99):
        settings = evaluate.EvaluateSettings(tokens=limit)
        _, per_token, per_byte, _ = evaluated(model, Mangling(), data, settings)
        assert per_byte == pytest.approx(per_token * val['tokens'] / val['bytes'], rel=0.02)
    assert evaluated(model, Mangling(), shard, settings)[2] is None


def test_tokens_are_counted_over_all_shards(model, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1000)
    data = str(tmp_path / 'd')
    texts = [b'text %d ' % i * 20 for i in range(100)]
    prepare_data.write_dataset(data, texts, BYTE, 0.4, 'test')
    assert len(read_meta(data)['val']['shards']) > 2

    settings = evaluate.EvaluateSettings(tokens=1500)
    n, *_ = evaluated(model, BYTE, data, settings)
    assert 1490 < n <= 1500


# ---- tasks ---------------------------------------------------------------------------------------

def by_hand(model, context, answer):
    """(log p of the answer, whether it is what greedy decoding says), a token at a time."""
    total = 0.0
    greedy = True
    tokens = list(context)
    for token in answer:
        row = log_p(model, tokens[-24:])[-1]
        total += row[token].item()
        greedy = greedy and row.argmax().item() == token
        tokens.append(token)
    return total, greedy


def test_log_likelihoods_by_hand(model):
    said = model.generate(torch.tensor([[5, 6]]), 3, temperature=0)[0].tolist()
    prompt, likeliest = said[:2], said[2:]
    pairs = [
        ([1, 2, 3], [4, 5]),
        ([256], [7]),
        (list(range(22)), [9, 9]),
        (prompt, likeliest),
    ]
    got = {i: answer for i, *answer in evaluate.log_likelihoods(model, pairs, 3)}
    for i, pair in enumerate(pairs):
        total, greedy = by_hand(model, *pair)
        assert got[i][0] == pytest.approx(total, abs=1e-5)
        assert got[i][1] == greedy
    assert got[3][1]
    assert not got[0][1]

    half = [likeliest[0], (likeliest[1] + 1) % 257]     # the likeliest token, then another
    [(_, _, greedy)] = evaluate.log_likelihoods(model, [(prompt, half)], 1)
    assert greedy is False


def test_a_long_context_loses_its_beginning(model):
    context = list(range(50))
    [(_, total, _)] = evaluate.log_likelihoods(model, [(context, [9, 9])], 1)
    want, _ = by_hand(model, context[-23:], [9, 9])     # that many fit beside the answer
    assert total == pytest.approx(want, abs=1e-5)
    with pytest.raises(UserError, match='25 tokens'):
        list(evaluate.log_likelihoods(model, [([1], [2] * 25)], 1))


def test_what_lm_eval_asks_for(model, folder, monkeypatch, capsys):
    """In its place a stand-in, which asks for a text and for answers, in this order."""
    text, pairs = 'some text', [([1, 2, 3], [4, 5]), ([256], [7]), ([*range(24)], [9, 9])]
    asked = []

    def simple_evaluate(lm, tasks, num_fewshot, task_manager):
        asked.append((tasks, num_fewshot))
        [total] = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))])
        return [total, *lm._loglikelihood_tokens([(None, *pair) for pair in pairs])]

    manager = SimpleNamespace(match_tasks=lambda names: names)
    for name, parts in dict(model=dict(TemplateLM=object), evaluator=dict(
            simple_evaluate=simple_evaluate), tasks=dict(TaskManager=lambda: manager),
            utils=dict(make_table=json.dumps)).items():
        place = 'lm_eval.api.model' if name == 'model' else f'lm_eval.{name}'
        monkeypatch.setitem(sys.modules, place, SimpleNamespace(**parts))
    evaluate.main([folder, '--tasks=piqa,arc', '--num_fewshot=0', '--device=cpu'])
    assert asked == [(['piqa', 'arc'], 0)]
    said = capsys.readouterr()
    told, *answers = json.loads(said.out.splitlines()[-1])
    assert "1 of 3 questions with an answer are longer than the model's context" in said.err
    assert told == pytest.approx(-plain_loop(model, [256, *text.encode()]), abs=1e-4)
    for (total, greedy), pair in zip(answers, pairs, strict=True):
        context, words = pair
        assert (pytest.approx(total, abs=1e-4), greedy) == by_hand(model, context[-23:], words)


def test_without_lm_eval_the_message_names_the_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, 'lm_eval.api.model', None)
    with pytest.raises(UserError, match='pip install lm_eval'):
        evaluate.main([folder, '--tasks=piqa'])


# ---- the program ---------------------------------------------------------------------------------

@pytest.mark.parametrize('args, words', [
    (['CKPT', 'no.txt'], 'no.txt: there is no such'),
    (['CKPT', 'TMP/empty.txt'], 'no text'),
    (['CKPT', 'TMP/other.bin'], 'token 1299 of a vocabulary of 257'),
    (['CKPT', 'TMP/words/val_000000.bin'], 'words has tokens of gpt2 that are not those of byte'),
    (['CKPT', 'TMP/records.jsonl'], 'records.jsonl: records.*prepare_data.py'),
    (['CKPT', 'TMP/records.ndjson'], 'records.ndjson: records.*prepare_data.py'),
    (['CKPT', 'TMP/records.json'], 'records.json: records or JSON'),
    (['CKPT', 'CKPT'], 'a checkpoint; only the first'),
    (['CKPT', '--ponder_steps=x'], 'give numbers'),
    (['CKPT', '--halt_tau=0.1'], 'no token of this model halts'),
    (['CKPT', 'TMP/a.txt', '--exact'], 'exact=True: is for latent, mask and feedback'),
    (['CKPT', 'TMP/a.txt', '--num_fewshot=0'], 'num_fewshot=0: is for --tasks'),
    (['CKPT', '--answers=9', '--tokens=9'], 'tokens=9: is for texts'),
    (['CKPT', '--answers=9', '--batch_size=9'], 'batch_size=9: is for texts and --tasks'),
])
def test_refusals(folder, tmp_path, args, words):
    (tmp_path / 'empty.txt').write_text('')
    for ending in ('jsonl', 'ndjson', 'json'):
        (tmp_path / f'records.{ending}').write_text('{"text": "text"}\n')
    (tmp_path / 'words').mkdir()
    (tmp_path / 'words' / 'val_000000.bin').touch()
    meta = dict(tokenizer='gpt2', n_tokens=50257, eot=50256, source='', train={}, val={})
    (tmp_path / 'words' / 'meta.json').write_text(json.dumps(meta))
    header = np.array([MAGIC, VERSION, 300] + [0] * 253, np.int32).tobytes()
    (tmp_path / 'other.bin').write_bytes(header + np.arange(1000, 1300, dtype=np.uint16).tobytes())
    args = [arg.replace('CKPT', folder).replace('TMP', str(tmp_path)) for arg in args]
    with pytest.raises(UserError, match=words):
        evaluate.main(args)


def test_too_little_memory_is_no_traceback(folder, monkeypatch):
    def full(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 "
                           "bytes")

    monkeypatch.setattr(evaluate, 'evaluate_text', full)
    with pytest.raises(UserError, match='out of memory.*batch_size'):
        evaluate.main([folder, __file__, '--device=cpu'])
