"""tools/evaluate.py: its numbers against plain loops, and lm_eval's against a hand-computed one."""
import json
import math
import os
import re
import sys

import numpy as np
import pytest
import tiktoken
import torch
from conftest import make, save

import prepare_data
from engine.files import UserError
from engine.shards import MAGIC, VERSION, get_tokenizer, open_shard, read_meta
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


def write_shard(path, tokens):
    """A shard of these tokens, whatever they are."""
    header = np.array([MAGIC, VERSION, len(tokens)] + [0] * 253, np.int32)
    path.write_bytes(header.tobytes() + np.array(tokens, np.uint16).tobytes())


@pytest.fixture
def model():
    return make(**SMALL, depth_attn=True).float()


@pytest.fixture
def folder(tmp_path, model, small_data):
    return save(tmp_path / 'ckpt', model, data_dir=small_data)


# ---- loss on texts -------------------------------------------------------------------------------

@pytest.mark.parametrize('ponder', ['none', 'chain', 'pause'])
@pytest.mark.parametrize('n', [2, 24, 25, 26, 130])
def test_equals_the_plain_loop(ponder, n):
    model = make(**SMALL, ponder=ponder, ponder_steps=1)
    tokens = np.random.default_rng(n).integers(0, 257, n).astype(np.uint16)
    want = plain_loop(model, tokens) / (n - 1)
    for batch_size in (1, 4):
        got = evaluate.nats(model, tokens, batch_size) / (n - 1)
        assert got == pytest.approx(want, abs=1e-9)
    got = evaluate.nats(model.float(), tokens, 4) / (n - 1)
    assert got == pytest.approx(want, rel=1e-6)


def run(capsys, *args):
    """What the program printed: [(tokens, nats per token, perplexity, bits per byte)], by line."""
    evaluate.main([*map(str, args), '--device=cpu'])
    pattern = (r': ([\d,]+) tokens, ([\d.]+) nats per token, perplexity ([\d.]+), '
               r'([\d.]+) bits per byte')
    lines = []
    for found in re.findall(pattern, capsys.readouterr().out):
        lines.append(tuple(float(number.replace(',', '')) for number in found))
    return lines


def test_a_text(model, folder, tmp_path, capsys):
    path = tmp_path / 'text.py'
    text = 'x = "é"\n' * 9
    path.write_text(text, encoding='utf-8')
    n = len(text.encode())
    want = plain_loop(model, [256, *text.encode()]) / n     # the first byte follows an end-of-text
    bits = want / math.log(2)
    assert run(capsys, folder, path) == [
        (n, round(want, 4), round(math.exp(want), 3), round(bits, 4))]


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
    count, per_token, _, bits_per_byte = of_folder
    assert count == 999
    assert per_token == pytest.approx(want / 999, abs=6e-5)
    assert bits_per_byte == pytest.approx(want / size / math.log(2), abs=6e-5)


def test_end_of_text_counts_no_bytes_wherever_it_stands(model, tmp_path):
    ranks = {bytes([i]): i for i in range(200)}
    ranks[b'xy'] = 201                      # behind end-of-text, as p50k_base has tokens
    tokenizer = tiktoken.Encoding('small', pat_str=r'(?s:.)', mergeable_ranks=ranks,
                                  special_tokens={'<|endoftext|>': 200})
    path = tmp_path / 'a.bin'
    write_shard(path, [200, 65, 201, 200, 66])
    settings = evaluate.EvaluateSettings()
    n, per_token, per_byte = evaluate.evaluate_text(model, tokenizer, str(path), settings)
    assert n == 4
    assert per_byte == pytest.approx(per_token)     # A, xy, nothing, B: 1 + 2 + 0 + 1 = 4 bytes


def test_tokens_are_counted_over_all_shards(model, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1000)
    data = str(tmp_path / 'd')
    texts = [b'text %d ' % i * 20 for i in range(100)]
    prepare_data.write_dataset(data, texts, BYTE, 0.4, 'test')
    assert len(read_meta(data)['val']['shards']) > 2

    settings = evaluate.EvaluateSettings(tokens=1500)
    n, *_ = evaluate.evaluate_text(model, BYTE, data, settings)
    assert 1490 < n <= 1500


# ---- sampled functions ---------------------------------------------------------------------------

@pytest.mark.parametrize('text, good', [
    ('def f(x):\n    return x\n\n\ndef g(', True),
    ('def f(x):\n    return x', False),
    ('def f(x:\n    return x\n\nx', False),
    ('def f(x):\n\n    return "\\d"\n\nclass A:', True),
    ('def f(x): return (\n    1)\nx', True),
    ('def f(x):\nreturn x\n', False),
    ('def f\0():\n    pass\nx', False),
])
def test_what_counts_as_a_function(text, good):
    assert evaluate.parses(text) == good


def test_samples_functions(model):
    settings = evaluate.EvaluateSettings(functions=5, max_new_tokens=30, batch_size=2)
    narrow = make(**{**SMALL, 'block_size': 4})     # "def " fills its context
    evaluate.sample_functions(narrow, BYTE, settings)
    texts = evaluate.sample_functions(model, BYTE, settings)
    assert len(texts) == 5
    assert len(set(texts)) == 5
    for text in texts:
        assert text.startswith('def ') and len(text) > 4


def test_share_of_functions(folder, capsys, monkeypatch):
    texts = ['def f():\n  pass\n#', 'def f(', 'def g(): 1\n#', 'def']
    monkeypatch.setattr(evaluate, 'sample_functions', lambda *_: texts)
    evaluate.main([folder, '--functions=4', '--device=cpu'])
    assert capsys.readouterr().out == '2 of 4 sampled functions are Python (50.0%)\n'


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


TASK = """task: tiny_local
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: a
doc_to_choice: "{{c}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_a_local_task_of_lm_eval(model, folder, tmp_path, capsys):
    pytest.importorskip('lm_eval')
    questions = {'a b': ['x', 'yy'], 'c': ['zz', 'q']}
    lines = []
    for i, (question, choices) in enumerate(questions.items()):
        scores = [by_hand(model, question.encode(), f' {c}'.encode())[0] for c in choices]
        best = scores.index(max(scores))
        right = (best + i) % 2      # of the first question the model's choice, of the second not
        lines.append(json.dumps(dict(q=question, c=choices, a=right)))
    (tmp_path / 'q.jsonl').write_text('\n'.join(lines))
    (tmp_path / 'tiny.yaml').write_text(TASK.replace('FILE', str(tmp_path / 'q.jsonl')))

    settings = evaluate.EvaluateSettings(tasks='tiny_local', include_path=str(tmp_path),
                                         num_fewshot=0)
    table = evaluate.run_tasks(model, BYTE, settings)
    accuracy = re.search(r'acc.*?([\d.]+)\s*\|±', table)[1]
    assert float(accuracy) == 0.5, table
    with pytest.raises(UserError, match='nosuchtask'):
        evaluate.main([folder, '--tasks=nosuchtask'])


def test_without_lm_eval_the_message_names_the_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, 'lm_eval.api.model', None)
    with pytest.raises(UserError, match='pip install lm_eval'):
        evaluate.main([folder, '--tasks=piqa'])


# ---- the program ---------------------------------------------------------------------------------

@pytest.mark.parametrize('args, words', [
    ([], 'checkpoint folder'),
    (['nowhere'], 'no checkpoint'),
    (['CKPT', 'no.txt'], 'no.txt'),
    (['CKPT', 'TMP/empty.txt'], 'no text'),
    (['CKPT', 'TMP/other.bin'], 'token 1299 of a vocabulary of 257'),
    (['CKPT', 'CKPT'], 'a checkpoint; only the first'),
    (['CKPT', '--tokens=1'], 'tokens=1'),
    (['CKPT', '--dtype=int8'], 'dtype'),
    (['CKPT', '--ponder_steps=2'], "ponder='none'"),
])
def test_refusals(folder, tmp_path, args, words):
    (tmp_path / 'empty.txt').write_text('')
    write_shard(tmp_path / 'other.bin', range(1000, 1300))
    args = [arg.replace('CKPT', folder).replace('TMP', str(tmp_path)) for arg in args]
    with pytest.raises(UserError, match=words) as error:
        evaluate.main(args)
    assert '\n' not in str(error.value)


def test_too_little_memory_is_no_traceback(folder, monkeypatch):
    def full(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 "
                           "bytes")

    monkeypatch.setattr(evaluate, 'evaluate_text', full)
    with pytest.raises(UserError, match='out of memory.*batch_size'):
        evaluate.main([folder, __file__, '--device=cpu'])


def test_a_missing_data_set_is_answered_with_what_makes_it(tmp_path):
    missing = str(tmp_path / 'missing')
    with pytest.raises(UserError, match='missing: cannot be read.*prepare_data.py'):
        evaluate.token_arrays(missing, BYTE)


def test_the_precision_asked_for_is_computed_in(folder, monkeypatch):
    seen = []

    def evaluate_text(model, *_):
        seen.append((model.wte.weight.dtype, model.training))
        return 1, 1.0, 1.0

    monkeypatch.setattr(evaluate, 'evaluate_text', evaluate_text)
    evaluate.main([folder, 'x', '--dtype=bfloat16', '--device=cpu'])
    assert seen == [(torch.bfloat16, False)]
