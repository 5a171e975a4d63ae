"""sample.py: text in, text out, from a checkpoint trained here."""
import re
import sys

import pytest
import torch
from conftest import TOGGLES, make, program, save, slow_but

import prepare_data
import sample
from engine.answers import behind_solved, exam_of_data
from engine.generate import generate, stream
from engine.files import UserError
from engine.shards import get_tokenizer
from engine.trained import load_model
from model import HALTING
from sample import encode_prompt

SMALL = dict(vocab_size=320, n_tokens=257, block_size=32)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with random weights."""
    model = make(**SMALL, depth_attn=True).float()
    return save(tmp_path / 'ckpt', model)


# ---- text out ------------------------------------------------------------------------------------

def test_streams_samples(folder, capsys):
    args = [folder, '--start=def ', '--num_samples=3', '--max_new_tokens=40', '--seed=3']
    sample.main(args)
    first = capsys.readouterr()
    texts = first.out.split('\n' + '-' * 80 + '\n')
    assert len(texts) == 3
    assert all(text.startswith('def ') for text in texts)
    assert len(set(texts)) == 3
    assert 'tokens/s' in first.err

    sample.main(args)
    assert capsys.readouterr().out == first.out


def test_a_terminal_that_cannot_show_a_character():
    """Of any program: each ends in `run(main)`."""
    code = "from engine.files import run; run(lambda argv: print('é'))"
    assert program('-c', code, PYTHONIOENCODING='ascii').stdout == '?\n'


def test_a_terminal_obeys_no_character_of_a_text(folder, capsys, monkeypatch):
    """An escape could clear it, or write into its title."""
    args = [folder, '--start=a\x1b]0;b\x07\x9b2J\té', '--max_new_tokens=1']
    sample.main(args)
    assert capsys.readouterr().out.startswith('a\x1b]0;b\x07\x9b2J\té')     # in a file
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    sample.main(args)
    assert capsys.readouterr().out.startswith('a\ufffd]0;b\ufffd\ufffd2J\té')


def test_prints_what_the_model_generates(folder, capsys):
    model, tokenizer, _ = load_model(folder, 'cpu')
    prompt = tokenizer.encode_ordinary('x = ')
    tokens = generate(model, [prompt], 50, temperature=0, stop_token=256)[0].tolist()
    text = tokenizer.decode_bytes([t for t in tokens if t < 256])
    sample.main([folder, '--start=x = ', '--max_new_tokens=50', '--temperature=0', '--device=cpu'])
    assert capsys.readouterr().out == text.decode('utf-8', 'replace')


def test_no_rule_halts_a_model_of_one_pass(tmp_path):
    loop = save(tmp_path, make(**{**TOGGLES['loop'], **SMALL, 'ponder_steps': 0}).float())
    with pytest.raises(UserError, match="halting='exit': .* trained with ponder_steps=0"):
        sample.main([loop, '--halting=exit', '--device=cpu'])


def test_show_steps(tmp_path, capsys):
    model = make(**TOGGLES['exit'], **SMALL).float()
    save(tmp_path, model)
    args = [str(tmp_path), '--start=ab', '--max_new_tokens=20', '--temperature=0', '--device=cpu']
    sample.main(args)
    plain = capsys.readouterr().out
    sample.main([*args, '--show_steps=True'])
    text, legend = capsys.readouterr().out.split('\n\npasses per token: ')
    assert text.count('\x1b[30;48;5;') > 10
    most = model.config.ponder_steps + 1
    assert legend.count('\x1b[0m') == most
    assert re.sub(r'\x1b\[[\d;]*m', '', text) == plain.rstrip('\n')

    for tau, passes in ((0, most), (1, 1)):
        sample.main(args + [f'--halt_tau={tau}'])
        assert f'{passes:.2f} passes per token' in capsys.readouterr().err


# ---- text in -------------------------------------------------------------------------------------

def test_nanogpts_way_to_ask_for_a_new_document(folder, capsys):
    texts = []
    for start in ([], ['--start=<|endoftext|>'], ['--start=<|endoftext|>def '], ['--start=def ']):
        sample.main([folder, *start, '--max_new_tokens=20', '--device=cpu'])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[2].startswith('<|endoftext|>def ')
    assert texts[2].removeprefix('<|endoftext|>') != texts[3], "the model reads the token"
    for prompt, tokens in (('<|endoftext|>a', [256, 97]), ('<|endoftext|>', [256]),
                           ('a<|endoftext|>b', [97, 256, 98])):
        assert encode_prompt(prompt, get_tokenizer('byte'), 9) == tokens


def test_start_from_a_file(folder, tmp_path, capsys):
    path = tmp_path / 'prompt.txt'
    path.write_text('import os\n')
    texts = []
    for start in ('import os\n', f'FILE:{path}'):
        sample.main([folder, f'--start={start}', '--max_new_tokens=20', '--seed=1'])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith('import os\n')


def test_prompts(tmp_path, capsys):
    byte = get_tokenizer('byte')
    raw = b'a\r\ncaf\xe9\n'
    (tmp_path / 'prompt.txt').write_bytes(raw)      # as the model saw such files in training
    assert encode_prompt(f'FILE:{tmp_path}/prompt.txt', byte, 99) == list(raw)
    assert 'lines end as on Windows' in capsys.readouterr().err
    assert encode_prompt('caf\udce9', byte, 99) == list(b'caf\xe9')    # from a shell
    assert encode_prompt(None, byte, 4) == [256]
    assert encode_prompt('é', byte, 4) == [195, 169]


def test_a_question_of_a_made_task_is_asked_as_in_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(prepare_data.DataSettings(problems=100), ['addition'])
    model = make(**{**SMALL, 'block_size': 128}).float()
    folder = save(tmp_path / 'sums', model, data_dir='data/addition')
    exam = exam_of_data('data/addition')
    solved = ''.join(f'\0{question}{answer}' for question, answer in exam['problems'][:2])
    prompt = [ord(c) or 256 for c in solved + '\0' + '1999+8001=']
    asked = []
    monkeypatch.setattr(sample, 'stream', lambda model, prompts, *args, **options:
                        asked.append(prompts) or stream(model, prompts, *args, **options))
    sample.main([folder, '--start=1999+8001=', '--max_new_tokens=5', '--device=cpu'])
    assert asked == [[prompt]]
    said = capsys.readouterr()
    assert '\n1999+8001=' in said.out
    assert 'behind solved problems' in said.err
    (tmp_path / 'q').write_text('1999+8001\n')     # without its end, and with that of a line
    for start in ('<|endoftext|>1999+8001=', 'FILE:q'):
        sample.main([folder, f'--start={start}', '--max_new_tokens=5', '--device=cpu'])
    assert asked.pop() == [prompt]
    for block_size, solved in (31, 0), (32, 1), (48, 2):    # 16 tokens each; room for the answer
        behind = behind_solved([256, *b'1999+8001='], exam, block_size)
        assert len(behind) == 11 + 16 * solved
    for start in ('hello', '74+67,19+80', '74 + 67'):
        with pytest.raises(UserError, match='no problem of addition'):
            sample.main([folder, f'--start={start}', '--device=cpu'])
    for between in ('\n', ',', ' '):       # tools/explain.py takes a list
        with pytest.raises(UserError, match='reads one problem at a time'):
            sample.main([folder, f'--start=1999+8001={between}7420+6779=', '--device=cpu'])
    asked.clear()       # a text that leaves no room for them
    long = '1' * 63 + '+' + '1' * 63 + '='
    sample.main([folder, f'--start={long}', '--max_new_tokens=1', '--device=cpu'])
    assert asked == [[[*long.encode()]]]
    asked.clear()       # none is named: one of the validation set
    capsys.readouterr()
    sample.main([folder, '--max_new_tokens=5', '--device=cpu'])
    [[prompt]] = asked
    question, _ = exam['problems'][-1]
    assert bytes(prompt[-len(question):]).decode() == question
    assert capsys.readouterr().out.startswith(question)


# ---- settings ------------------------------------------------------------------------------------

def test_each_setting_reaches_the_model(tmp_path, monkeypatch):
    model = make(vocab_size=320, n_tokens=257, dropout=0.5, ponder='latent', ponder_steps=1)
    folder = save(tmp_path, model)
    told = []

    def stream(model, prompts, n, **options):
        told.append((n, options, model.wte.weight.dtype, model.training))
        yield torch.tensor([65]), torch.tensor([1])

    monkeypatch.setattr(sample, 'stream', stream)
    sample.main([folder, '--max_new_tokens=7', '--top_k=3', '--top_p=0.9', '--exact=True',
                 '--dtype=bfloat16', '--temperature=0.5', '--seed=4', '--device=cpu'])
    options = dict(top_k=3, top_p=0.9, exact=True, temperature=0.5, seed=4, stop_token=256)
    assert told == [(7, options, torch.bfloat16, False)]


def test_a_rule_without_weights_can_be_asked_for(tmp_path):
    """A loop that was trained without leaves early; what the rule needs weights for is refused."""
    loop = make(**SMALL, ponder='loop', ponder_steps=3).float()
    model, _, _ = load_model(save(tmp_path / 'loop', loop), 'cpu', halting='exit')
    model.config.halt_tau = 1.0     # nobody is that unsure: all leave after the first pass
    idx = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(idx)[0], model.head(model.trunk(model.embed(idx))))
    assert model.mechanism.passes.tolist() == [[1, 1, 1]]
    model.config.halt_tau = 0.0
    torch.testing.assert_close(model(idx)[0], loop.eval()(idx)[0])
    deep = make(**SMALL, ponder='loop', depth_attn=True).float()
    with pytest.raises(UserError, match='passes read earlier ones'):
        load_model(save(tmp_path / 'deep', deep), 'cpu', halting='exit')
    ponder = make(**SMALL, ponder='embedding').float()
    with pytest.raises(UserError, match="halting='gate': this model has other weights"):
        load_model(save(tmp_path / 'ponder', ponder), 'cpu', halting='gate')


@pytest.mark.parametrize('halting', slow_but(['gate'], ['gate', 'mask', 'router', 'exit']))
def test_steps_that_cannot_halt_are_refused(tmp_path, halting):
    """A model trained with ponder_steps=0 has no halting, whatever its settings ask for."""
    ponder = HALTING[halting].works_on
    folder = save(tmp_path / 'out', make(**SMALL, ponder=ponder, ponder_steps=0, halting=halting))
    for asked in (['--ponder_steps=3', '--halt_tau=1'], ['--ponder_steps=1']):
        with pytest.raises(UserError, match='ponder_steps=[31]: .* trained with ponder_steps=0'):
            sample.main([folder, *asked])
    sample.main([folder, '--ponder_steps=0', '--max_new_tokens=1'])


def test_attention_that_plans_each_length_is_for_training(folder):
    assert torch.backends.cuda.cudnn_sdp_enabled()
    load_model(folder, 'cpu')
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize('args, words', [
    ([], ['checkpoint folder']),
    (['nowhere'], ['nowhere', 'no checkpoint']),
    (['CKPT', 'b'], ['one checkpoint']),
    (['CKPT', '--start='], ['empty']),
    (['CKPT', '--start=' + 'x' * 99], ['99 tokens', '32']),
    (['CKPT', '--start=FILE:nofile'], ['nofile', 'cannot be read']),
    (['CKPT', '--temperature=-1'], ['temperature']),
    (['CKPT', '--top_p=2'], ['top_p']),
    (['CKPT', '--top_k=0'], ['top_k']),
    (['CKPT', '--num_samples=0'], ['num_samples']),
    (['CKPT', '--halt_tau=0.5'], ['halt_tau', 'no token of this model halts']),
    (['CKPT', '--halting=exit'], ["halting='exit'", "ponder='loop'"]),
    (['CKPT', '--ponder_steps=2'], ['ponder_steps', "ponder='none'"]),
    (['CKPT', '--temperature=0', '--num_samples=2'], ['num_samples=2: is for a temperature']),
    (['CKPT', '--exact'], ['exact=True: is for latent, mask and feedback']),
    (['CKPT', '--device=tpu9'], ['tpu9']),
])
def test_refusals(folder, args, words):
    args = [folder if arg == 'CKPT' else arg for arg in args]
    with pytest.raises(UserError) as error:
        sample.main(args)
    for word in words:
        assert word in str(error.value)
