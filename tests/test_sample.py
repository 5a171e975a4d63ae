"""sample.py: text in, text out, from a checkpoint trained here."""
import os
import re

import pytest
import torch
from conftest import ROOT, TOGGLES, make, program, refused, save

import sample
from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.errors import UserError
from engine.shards import get_tokenizer
from model import GPT
from sample import encode_prompt


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with random weights."""
    model = make(vocab_size=320, n_tokens=257, block_size=32, depth_attn=True).float()
    return save(tmp_path / 'ckpt', model)


def test_streams_samples(folder, capsys):
    sample.main([folder, '--start=def ', '--num_samples=3', '--max_new_tokens=40', '--seed=3'])
    out = capsys.readouterr()
    texts = out.out.split('\n' + '-' * 80 + '\n')
    assert len(texts) == 3 and all(t.startswith('def ') for t in texts) and len(set(texts)) == 3
    assert 'tokens/s' in out.err
    sample.main([folder, '--start=def ', '--num_samples=3', '--max_new_tokens=40', '--seed=3'])
    assert capsys.readouterr().out == out.out


def test_prints_what_the_model_generates(folder, capsys):
    model, tokenizer, _ = sample.load_model(folder, 'cpu')
    prompt = tokenizer.encode_ordinary('x = ')
    want = model.generate([prompt], 50, temperature=0, stop_token=256)[0].tolist()
    sample.main([folder, '--start=x = ', '--max_new_tokens=50', '--temperature=0', '--device=cpu'])
    assert capsys.readouterr().out == tokenizer.decode_bytes([t for t in want if t < 256]).decode('utf-8', 'replace')


def test_start_from_a_file(folder, tmp_path, capsys):
    path = tmp_path / 'prompt.txt'
    path.write_text('import os\n')
    assert encode_prompt(f'FILE:{path}', get_tokenizer('byte'), 32) == list(b'import os\n')
    texts = []
    for start in ('import os\n', f'FILE:{path}'):
        sample.main([folder, f'--start={start}', '--max_new_tokens=20', '--seed=1'])
        texts.append(capsys.readouterr().out)
    assert texts[0] == 'import os\n' + texts[1]  # a file's text is not repeated


def test_attention_that_plans_each_length_is_for_training(folder):
    assert torch.backends.cuda.cudnn_sdp_enabled()
    sample.load_model(folder, torch.device('cpu'))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_prompts():
    byte = get_tokenizer('byte')
    assert encode_prompt(None, byte, 4) == [256] and encode_prompt('é', byte, 4) == [195, 169]
    with pytest.raises(UserError, match='empty'): encode_prompt('', byte, 4)
    with pytest.raises(UserError, match='5 tokens.*4'): encode_prompt('abcde', byte, 4)
    with pytest.raises(UserError, match='cannot be read'): encode_prompt('FILE:nowhere', byte, 4)


@pytest.mark.parametrize('args, words', [
    ([], ['checkpoint folder']), (['nowhere'], ['nowhere', 'no checkpoint']), (['CKPT', '--start='], ['empty']), (['CKPT', '--start=' + 'x' * 99], ['99 tokens', '32']),
    (['CKPT', '--start=FILE:nofile'], ['nofile']), (['CKPT', '--temperature=-1'], ['temperature']), (['CKPT', '--temperature=1e-9'], ['temperature']), (['CKPT', '--top_p=2'], ['top_p']), (['CKPT', '--top_p=1e-9'], ['top_p']), (['CKPT', '--top_k=0'], ['top_k']),
    (['CKPT', '--tempreature=1'], ['temperature']), (['CKPT', '--num_samples=0'], ['num_samples']), (['CKPT', '--max_new_tokens=10**13'], ['max_new_tokens']), (['CKPT', '--device=tpu9'], ['tpu9']), (['CKPT', 'b'], ['one checkpoint'])])
def test_refusals(folder, args, words):
    with pytest.raises(UserError) as error: sample.main([folder if a == 'CKPT' else a for a in args])
    assert '\n' not in str(error.value)
    for word in words: assert word in str(error.value)


def test_exit_status_and_one_line():
    refused(program(os.path.join(ROOT, 'sample.py'), 'nowhere', ok=False), 'nowhere', 'train.py')


def test_compiling_without_a_compiler_is_refused(folder, monkeypatch):
    def compiled(*args): raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")  # test_train.py has the real one
    monkeypatch.setattr(torch, 'compile', lambda f, mode: compiled)
    with pytest.raises(UserError, match='compile=True needs a C'): sample.main([folder, '--compile=True', '--max_new_tokens=5'])


def test_weights_that_do_not_fit_their_settings(folder):
    state = load_checkpoint(folder)
    state['config']['n_layer'] = 4
    state['config']['depth_stride'] = 2
    save_checkpoint(folder, dict(state))
    with pytest.raises(UserError, match='do not fit'): sample.main([folder])


@pytest.mark.parametrize('toggle', ['gate', 'mask', 'router'])
def test_show_steps(tmp_path, capsys, monkeypatch, toggle):
    model = make(**TOGGLES[toggle], vocab_size=320, n_tokens=257, block_size=32).float()
    save(tmp_path, model)
    most = model.config.ponder_steps + 1
    args = [str(tmp_path), '--start=ab', '--max_new_tokens=20', '--temperature=0', '--device=cpu', '--show_steps=True']
    sample.main(args)
    plain = capsys.readouterr()
    assert plain.out.startswith('ab[') and '[n] before the text' in plain.out
    monkeypatch.setattr('sys.stdout.isatty', lambda: True)
    monkeypatch.delenv('NO_COLOR', raising=False)
    monkeypatch.setenv('TERM', 'xterm')
    sample.main(args)
    coloured = capsys.readouterr().out
    strip = lambda text, marks: re.sub(marks, '', text.split('passes per token')[0])
    assert strip(coloured, r'\x1b\[[\d;]*m') == strip(plain.out, r'\[\d\]') and coloured.count('\x1b[30;48;5;') > 10
    for tau, want in ((0, most), (1.1, 1)):
        sample.main(args + [f'--halt_tau={tau}'])
        assert f'{want:.2f} passes per token' in capsys.readouterr().err


def test_settings_that_mean_nothing_to_the_model_are_refused(folder):
    for setting, reason in (('halt_tau=0.5', "halting='none'"), ('ponder_steps=2', "ponder='none'"), ('seed=-1', 'must be')):
        with pytest.raises(UserError, match=f"{setting.split('=')[0]}.*{reason}"): sample.main([folder, f'--{setting}'])


def test_each_setting_reaches_the_model(tmp_path, monkeypatch):
    folder, told = save(tmp_path, make(vocab_size=320, n_tokens=257, dropout=0.5, ponder='latent', ponder_steps=1)), []
    def stream(self, prompts, n, **options):
        told.append((n, options, self.wte.weight.dtype, self.training))
        yield torch.tensor([65]), torch.tensor([1])
    monkeypatch.setattr(GPT, 'stream', stream)
    sample.main([folder, '--max_new_tokens=7', '--top_k=3', '--top_p=0.9', '--exact=True', '--dtype=bfloat16', '--temperature=0.5', '--seed=4', '--device=cpu'])
    assert told == [(7, dict(top_k=3, top_p=0.9, exact=True, temperature=0.5, seed=4, stop_token=256), torch.bfloat16, False)]
