"""sample.py: text in, text out, from a checkpoint trained here."""
import os
import re
from itertools import pairwise

import pytest
import torch
from conftest import ROOT, TOGGLES, make, program, refused, save

import sample
from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.files import UserError
from engine.shards import get_tokenizer
from model import GPT
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


def test_prints_what_the_model_generates(folder, capsys):
    model, tokenizer, _ = sample.load_model(folder, 'cpu')
    prompt = tokenizer.encode_ordinary('x = ')
    tokens = model.generate([prompt], 50, temperature=0, stop_token=256)[0].tolist()
    text = tokenizer.decode_bytes([t for t in tokens if t < 256])
    sample.main([folder, '--start=x = ', '--max_new_tokens=50', '--temperature=0', '--device=cpu'])
    assert capsys.readouterr().out == text.decode('utf-8', 'replace')


@pytest.mark.parametrize('toggle', ['gate', 'mask', 'router'])
def test_show_steps(tmp_path, capsys, monkeypatch, toggle):
    model = make(**TOGGLES[toggle], **SMALL).float()
    save(tmp_path, model)
    args = [str(tmp_path), '--start=ab', '--max_new_tokens=20', '--temperature=0', '--device=cpu',
            '--show_steps=True']
    sample.main(args)
    plain = capsys.readouterr().out
    assert plain.startswith('ab[')
    assert '[n] before the text' in plain
    marks = re.findall(r'\[(\d)\]', plain)
    assert all(mark != next_mark for mark, next_mark in pairwise(marks))    # where it changes

    monkeypatch.setattr('sys.stdout.isatty', lambda: True)
    monkeypatch.delenv('NO_COLOR', raising=False)
    monkeypatch.setenv('TERM', 'xterm')
    sample.main(args)
    coloured = capsys.readouterr().out
    assert without_marks(coloured, r'\x1b\[[\d;]*m') == without_marks(plain, r'\[\d\]')
    assert coloured.count('\x1b[30;48;5;') > 10

    most = model.config.ponder_steps + 1
    for tau, passes in ((0, most), (1.1, 1)):
        sample.main(args + [f'--halt_tau={tau}'])
        assert f'{passes:.2f} passes per token' in capsys.readouterr().err


def without_marks(text, marks):
    """The samples of an output, without its marks (a pattern) and its legend."""
    return re.sub(marks, '', text.split('passes per token')[0])


# ---- text in -------------------------------------------------------------------------------------

def test_start_from_a_file(folder, tmp_path, capsys):
    path = tmp_path / 'prompt.txt'
    path.write_text('import os\n')
    assert encode_prompt(f'FILE:{path}', get_tokenizer('byte'), 32) == list(b'import os\n')

    texts = []
    for start in ('import os\n', f'FILE:{path}'):
        sample.main([folder, f'--start={start}', '--max_new_tokens=20', '--seed=1'])
        texts.append(capsys.readouterr().out)
    assert texts[0] == 'import os\n' + texts[1]     # a file's text is not repeated


def test_prompts():
    byte = get_tokenizer('byte')
    assert encode_prompt(None, byte, 4) == [256]
    assert encode_prompt('é', byte, 4) == [195, 169]
    with pytest.raises(UserError, match='empty'):
        encode_prompt('', byte, 4)
    with pytest.raises(UserError, match='5 tokens.*4'):
        encode_prompt('abcde', byte, 4)
    with pytest.raises(UserError, match='cannot be read'):
        encode_prompt('FILE:nowhere', byte, 4)


# ---- settings ------------------------------------------------------------------------------------

def test_each_setting_reaches_the_model(tmp_path, monkeypatch):
    model = make(vocab_size=320, n_tokens=257, dropout=0.5, ponder='latent', ponder_steps=1)
    folder = save(tmp_path, model)
    told = []

    def stream(self, prompts, n, **options):
        told.append((n, options, self.wte.weight.dtype, self.training))
        yield torch.tensor([65]), torch.tensor([1])

    monkeypatch.setattr(GPT, 'stream', stream)
    sample.main([folder, '--max_new_tokens=7', '--top_k=3', '--top_p=0.9', '--exact=True',
                 '--dtype=bfloat16', '--temperature=0.5', '--seed=4', '--device=cpu'])
    options = dict(top_k=3, top_p=0.9, exact=True, temperature=0.5, seed=4, stop_token=256)
    assert told == [(7, options, torch.bfloat16, False)]


@pytest.mark.parametrize('setting, reason', [
    ('halt_tau=0.5', "halt_tau.*halting='none'"),
    ('ponder_steps=2', "ponder_steps.*ponder='none'"),
    ('seed=-1', 'seed.*must be'),
])
def test_settings_that_mean_nothing_to_the_model_are_refused(folder, setting, reason):
    with pytest.raises(UserError, match=reason):
        sample.main([folder, f'--{setting}'])


def test_attention_that_plans_each_length_is_for_training(folder):
    assert torch.backends.cuda.cudnn_sdp_enabled()
    sample.load_model(folder, torch.device('cpu'))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# ---- what is refused -----------------------------------------------------------------------------

@pytest.mark.parametrize('args, words', [
    ([], ['checkpoint folder']),
    (['nowhere'], ['nowhere', 'no checkpoint']),
    (['CKPT', 'b'], ['one checkpoint']),
    (['CKPT', '--start='], ['empty']),
    (['CKPT', '--start=' + 'x' * 99], ['99 tokens', '32']),
    (['CKPT', '--start=FILE:nofile'], ['nofile']),
    (['CKPT', '--temperature=-1'], ['temperature']),
    (['CKPT', '--temperature=1e-9'], ['temperature']),
    (['CKPT', '--top_p=2'], ['top_p']),
    (['CKPT', '--top_p=1e-9'], ['top_p']),
    (['CKPT', '--top_k=0'], ['top_k']),
    (['CKPT', '--tempreature=1'], ['temperature']),
    (['CKPT', '--num_samples=0'], ['num_samples']),
    (['CKPT', '--max_new_tokens=10**13'], ['max_new_tokens']),
    (['CKPT', '--device=tpu9'], ['tpu9']),
])
def test_refusals(folder, args, words):
    args = [folder if arg == 'CKPT' else arg for arg in args]
    with pytest.raises(UserError) as error:
        sample.main(args)
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_exit_status_and_one_line():
    done = program(os.path.join(ROOT, 'sample.py'), 'nowhere', ok=False)
    refused(done, 'nowhere', 'train.py')


def test_compiling_without_a_compiler_is_refused(folder, monkeypatch):
    def compiled(*args):    # test_train.py has the real one
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    monkeypatch.setattr(torch, 'compile', lambda f, mode: compiled)
    with pytest.raises(UserError, match='compile=True needs a C'):
        sample.main([folder, '--compile=True', '--max_new_tokens=5'])


def test_weights_that_do_not_fit_their_settings(folder):
    state = load_checkpoint(folder)
    state['config']['n_layer'] = 4
    state['config']['depth_stride'] = 2
    save_checkpoint(folder, dict(state))
    os.remove(os.path.join(folder, 'ckpt_prev.pt'))
    with pytest.raises(UserError, match='a model of its config has no such weight'):
        sample.main([folder])
