"""tools/evaluate.py: its numbers against plain loops, and lm_eval's against a hand-computed answer."""
import json
import math
import os
import re

import numpy as np
import pytest
import tiktoken
import torch
from conftest import make, save

import prepare_data
from engine.errors import UserError
from engine.shards import MAGIC, VERSION, get_tokenizer, open_shard, read_meta
from tools import evaluate

BYTE = get_tokenizer('byte')


def log_p(model, tokens):
    """log p (T, V) of what follows each of a few tokens."""
    with torch.no_grad(): return model(torch.tensor([tokens]))[0][0].double().log_softmax(-1)


def plain_loop(model, tokens):
    """Total nats: window after window, one at a time."""
    total, T = 0.0, model.config.block_size
    for first in range(0, len(tokens) - 1, T):
        window = [int(t) for t in tokens[first:first + T + 1]]
        total -= sum(row[target].item() for row, target in zip(log_p(model, window[:-1]), window[1:]))
    return total


@pytest.fixture
def model():
    return make(vocab_size=320, n_tokens=257, block_size=24, depth_attn=True).float()


@pytest.fixture
def folder(tmp_path, model, small_data):
    return save(tmp_path / 'ckpt', model, data_dir=small_data)


def run(capsys, *args):
    """What the program printed: [(tokens, nats per token, perplexity, bits per byte)] of its lines."""
    evaluate.main([*map(str, args), '--device=cpu'])
    pattern = r': ([\d,]+) tokens, ([\d.]+) nats per token, perplexity ([\d.]+), ([\d.]+) bits per byte'
    return [tuple(float(x.replace(',', '')) for x in found) for found in re.findall(pattern, capsys.readouterr().out)]


@pytest.mark.parametrize('ponder', ['none', 'chain', 'pause'])
@pytest.mark.parametrize('n', [2, 24, 25, 26, 130])
def test_equals_the_plain_loop(ponder, n):
    model = make(vocab_size=320, n_tokens=257, block_size=24, ponder=ponder, ponder_steps=1)
    tokens = np.random.default_rng(n).integers(0, 257, n).astype(np.uint16)
    want = plain_loop(model, tokens)
    for batch in (1, 4): assert evaluate.nats(model, tokens, batch) / (n - 1) == pytest.approx(want / (n - 1), abs=1e-9)
    assert evaluate.nats(model.float(), tokens, 4) / (n - 1) == pytest.approx(want / (n - 1), rel=1e-6)


def test_a_text_a_shard_and_a_folder(model, folder, small_data, tmp_path, capsys):
    path, text = tmp_path / 'text.py', 'x = "é"\n' * 9
    path.write_text(text, encoding='utf-8')
    want = plain_loop(model, [256, *text.encode()])  # the first byte follows an end-of-text
    n = len(text.encode())
    assert run(capsys, folder, path) == [(n, round(want / n, 4), round(math.exp(want / n), 3), round(want / n / math.log(2), 4))]
    # the default is the validation set of the checkpoint's data; its end-of-text tokens are tokens, but no bytes
    shard = os.path.join(small_data, read_meta(small_data)['val']['shards'][0]['name'])
    tokens = open_shard(shard)[:1000]
    want, size = plain_loop(model, tokens), int((tokens[1:] < 256).sum())
    assert size < 999
    both = run(capsys, folder, small_data, shard, '--tokens=1000')
    assert both[0] == both[1] == run(capsys, folder, '--tokens=1000')[0]
    assert both[0][0] == 999 and both[0][1] == pytest.approx(want / 999, abs=6e-5) and both[0][3] == pytest.approx(want / size / math.log(2), abs=6e-5)


def test_end_of_text_counts_no_bytes_wherever_it_stands(model, tmp_path):
    tokenizer = tiktoken.Encoding('small', pat_str=r'(?s:.)', mergeable_ranks={**{bytes([i]): i for i in range(200)}, b'xy': 201},
                                  special_tokens={'<|endoftext|>': 200})  # as p50k_base has tokens behind it
    tokens = np.array([200, 65, 201, 200, 66], np.uint16)
    (tmp_path / 'a.bin').write_bytes(np.array([MAGIC, VERSION, len(tokens)] + [0] * 253, np.int32).tobytes() + tokens.tobytes())
    n, per_token, per_byte = evaluate.evaluate_text(model, tokenizer, str(tmp_path / 'a.bin'), evaluate.EvaluateSettings())
    assert n == 4 and per_byte == pytest.approx(per_token)  # A, xy, nothing, B: 4 tokens of 1 + 2 + 0 + 1 = 4 bytes


@pytest.mark.parametrize('text, good', [
    ('def f(x):\n    return x\n\n\ndef g(', True), ('def f(x):\n    return x', False), ('def f(x:\n    return x\n\nx', False),
    ('def f(x):\n\n    return "\\d"\n\nclass A:', True), ('def f(x): return (\n    1)\nx', True), ('def f(x):\nreturn x\n', False), ('def f\0():\n    pass\nx', False)])
def test_what_counts_as_a_function(text, good):
    assert evaluate.parses(text) == good


def test_share_of_functions(model, folder, capsys, monkeypatch):
    s = evaluate.EvaluateSettings(functions=5, max_new_tokens=30, batch_size=2)
    for m in (make(vocab_size=320, n_tokens=257, block_size=4), model): texts = evaluate.sample_functions(m, BYTE, s)  # "def " fills the first
    assert len(texts) == 5 and len(set(texts)) == 5 and all(t.startswith('def ') and len(t) > 4 for t in texts)
    monkeypatch.setattr(evaluate, 'sample_functions', lambda *_: ['def f():\n  pass\n#', 'def f(', 'def g(): 1\n#', 'def'])
    evaluate.main([folder, '--functions=4', '--device=cpu'])
    assert capsys.readouterr().out == '2 of 4 sampled functions are Python (50.0%)\n'


def by_hand(model, context, answer):
    """(log p of the answer, whether it is what greedy decoding says), a token at a time."""
    total, greedy, tokens = 0.0, True, list(context)
    for token in answer:
        row = log_p(model, tokens[-24:])[-1]
        total, greedy, tokens = total + row[token].item(), greedy and row.argmax().item() == token, [*tokens, token]
    return total, greedy


def test_log_likelihoods_by_hand(model):
    likeliest = model.generate(torch.tensor([[5, 6]]), 3, temperature=0)[0].tolist()
    pairs = [([1, 2, 3], [4, 5]), ([256], [7]), (list(range(22)), [9, 9]), (likeliest[:2], likeliest[2:])]
    got = dict((i, answer) for i, *answer in evaluate.log_likelihoods(model, pairs, 3))
    for i, pair in enumerate(pairs):
        want = by_hand(model, *pair)
        assert got[i][0] == pytest.approx(want[0], abs=1e-5) and got[i][1] == want[1]
    assert got[3][1] and not got[0][1]
    half = [likeliest[2], (likeliest[3] + 1) % 257]  # the likeliest token, then another
    assert [greedy for *_, greedy in evaluate.log_likelihoods(model, [(likeliest[:2], half)], 1)] == [False]
    (_, long, _), = evaluate.log_likelihoods(model, [(list(range(50)), [9, 9])], 1)  # the last 23 tokens of the context fit
    assert long == pytest.approx(by_hand(model, list(range(27, 50)), [9, 9])[0], abs=1e-5)
    with pytest.raises(UserError, match='25 tokens'): list(evaluate.log_likelihoods(model, [([1], [2] * 25)], 1))


def test_a_local_task_of_lm_eval(model, folder, tmp_path, capsys):
    pytest.importorskip('lm_eval')
    questions, lines = {'a b': ['x', 'yy'], 'c': ['zz', 'q']}, []
    for i, (q, choices) in enumerate(questions.items()):  # the first answer is the model's choice, the second is not
        scores = [by_hand(model, q.encode(), f' {c}'.encode())[0] for c in choices]
        lines.append(json.dumps(dict(q=q, c=choices, a=(scores.index(max(scores)) + i) % 2)))
    (tmp_path / 'q.jsonl').write_text('\n'.join(lines))
    (tmp_path / 'tiny.yaml').write_text(f"""task: tiny_local
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / 'q.jsonl'}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_target: a
doc_to_choice: "{{{{c}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    s = evaluate.EvaluateSettings(tasks='tiny_local', include_path=str(tmp_path), num_fewshot=0)
    table = evaluate.run_tasks(model, BYTE, s)
    assert float(re.search(r'acc.*?([\d.]+)\s*\|±', table).group(1)) == 0.5, table
    with pytest.raises(UserError, match='nosuchtask'): evaluate.main([folder, '--tasks=nosuchtask'])


def test_refusals(folder, tmp_path, monkeypatch):
    (tmp_path / 'empty.txt').write_text('')
    tokens = np.arange(1000, 1300, dtype=np.uint16)
    (tmp_path / 'other.bin').write_bytes(np.array([MAGIC, VERSION, len(tokens)] + [0] * 253, np.int32).tobytes() + tokens.tobytes())
    for args, words in [([], 'checkpoint folder'), ([folder, 'no.txt'], 'no.txt'), ([folder, tmp_path / 'empty.txt'], 'no text'),
                        ([folder, '--tokens=1'], 'tokens=1'), ([folder, tmp_path / 'other.bin'], 'token 1299 of a vocabulary of 257'), ([folder, '--dtype=int8'], 'dtype'), ([folder, folder], 'a checkpoint; only the first'), ([folder, '--ponder_steps=2'], "ponder='none'"), (['nowhere'], 'no checkpoint')]:
        with pytest.raises(UserError, match=words) as error: evaluate.main([*map(str, args)])
        assert '\n' not in str(error.value)
    monkeypatch.setitem(__import__('sys').modules, 'lm_eval.api.model', None)
    with pytest.raises(UserError, match='pip install lm_eval'): evaluate.main([folder, '--tasks=piqa'])


def test_too_little_memory_is_no_traceback(folder, tmp_path, monkeypatch):
    def full(*args): raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    monkeypatch.setattr(evaluate, 'evaluate_text', full)
    with pytest.raises(UserError, match='out of memory.*batch_size'): evaluate.main([folder, __file__, '--device=cpu'])


def test_a_missing_data_set_is_answered_with_what_makes_it(tmp_path):
    with pytest.raises(UserError, match='missing: cannot be read.*prepare_data.py'): evaluate.token_arrays(str(tmp_path / 'missing'), BYTE)


def test_tokens_are_counted_over_all_shards(model, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1000)
    prepare_data.write_dataset(str(tmp_path / 'd'), [b'text %d ' % i * 20 for i in range(100)], BYTE, 0.4, 'test')
    assert len(read_meta(str(tmp_path / 'd'))['val']['shards']) > 2
    n, *_ = evaluate.evaluate_text(model, BYTE, str(tmp_path / 'd'), evaluate.EvaluateSettings(tokens=1500))
    assert 1490 < n <= 1500


def test_the_precision_asked_for_is_computed_in(folder, monkeypatch):
    seen = []
    monkeypatch.setattr(evaluate, 'evaluate_text', lambda model, *_: seen.append((model.wte.weight.dtype, model.training)) or (1, 1.0, 1.0))
    evaluate.main([folder, 'x', '--dtype=bfloat16', '--device=cpu'])
    assert seen == [(torch.bfloat16, False)]
