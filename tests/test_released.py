"""
Models that others released: their folders read, compared with slow loops and with transformers,
decoded exactly, put through the programs, or refused in one line.
"""

import copy
import json
import math
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from conftest import ROOT, save
from released import DEPTH, LATENT, NEOX, PONDER, logits, random_weights, write_folder, write_json

import sample
import train
from engine import room, tensors
from engine.checkpoint import load_checkpoint
from engine.files import UserError
from engine.tensors import open_tensors
from model import GPT, GPTConfig
from tools import evaluate, explain, hf, plot
from tools.hf import load_released

MODELS = {
    'pythia': NEOX,
    'serial': dict(NEOX, use_parallel_residual=False),
    'tied, other eps and theta': dict(NEOX, tie_word_embeddings=True, layer_norm_eps=1e-2,
                                      rotary_emb_base=100),
    'no biases, all channels turn': dict(NEOX, attention_bias=False, rotary_pct=1.0),
    'half of the channels turn': dict(NEOX, rotary_pct=0.5, hidden_act='gelu_new'),
    'three quarters, one layer': dict(NEOX, rotary_pct=0.75, num_hidden_layers=1),
    'PonderLM': PONDER,
    'PonderLM, not multiplied': dict(PONDER, mutiply_pondering_steps=False, pondering_steps=2),
    'PonderLM, not scaled': dict(PONDER, scale_embeds=False, use_parallel_residual=False),
    'PonderLM, tied, 0 steps': dict(PONDER, tie_word_embeddings=True, pondering_steps=0,
                                    mutiply_pondering_steps=False),
    'PonderLM-2': LATENT,
    'PonderLM-2, two thoughts': dict(LATENT, num_latent_thoughts=2, num_jacobi_iterations=2),
    'PonderLM-2, not scaled': dict(LATENT, scale_embeds=False, num_jacobi_iterations=0,
                                   use_parallel_residual=False),
    'PonderLM-2, no thoughts': dict(LATENT, num_latent_thoughts=0),
    'Depth-Attention': DEPTH,
    'Depth-Attention, every layer': dict(DEPTH, depth_attention_stride=1, scale_embeds=True),
    'Depth-Attention, tied, one key head': dict(DEPTH, depth_attention_stride=3,
                                                tie_word_embeddings=True, num_key_value_heads=1),
    'Depth-Attention without norms': dict(DEPTH, use_qk_norm=False),
    'its plain partner': dict(DEPTH, use_depth_attention=False),
    'PonderLM on Llama': dict(DEPTH, use_depth_attention=False, ponderinglm=True, pondering_steps=2,
                              mutiply_pondering_steps=True, scale_embeds=True),
}


@pytest.fixture
def tokens():
    """(2,9). Gradients are off: with them, what saves memory in training imports for seconds."""
    with torch.no_grad():
        yield torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def threads():
    """Programs choose threads and kernels for the whole process; a test puts threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---- what they compute ---------------------------------------------------------------------------

@pytest.mark.parametrize('name', MODELS)
def test_logits_equal_a_slow_loop(name, tmp_path, tokens):
    c = MODELS[name]
    folder, weights = write_folder(tmp_path, c)
    model = load_released(folder).double()
    want = logits(tokens, weights, c)
    assert not model.training
    assert (model(tokens)[0] - want).abs().max() < 1e-6 * want.abs().max()


@pytest.mark.parametrize('name', ['pythia', 'serial', 'three quarters, one layer', 'PonderLM',
                                  'PonderLM-2', 'PonderLM-2, two thoughts', 'Depth-Attention'])
def test_cached_generation_equals_recomputing(name, tmp_path, tokens):
    folder, _ = write_folder(tmp_path, MODELS[name])
    model = load_released(folder).double()
    latent = model.config.ponder == 'latent'
    sweeps = dict(jacobi=9 * model.config.ponder_steps) if latent else {}   # enough to be exact
    cached = model.generate(tokens[:, :4], 5, temperature=0, exact=latent)
    seen = tokens[:, :4]
    for _ in range(5):
        seen = torch.cat((seen, model(seen, **sweeps)[0][:, -1:].argmax(-1)), 1)
    assert torch.equal(cached, seen)


@pytest.mark.parametrize('change', [
    dict(),
    dict(use_parallel_residual=False),
    dict(attention_bias=False, hidden_act='gelu_new', rotary_pct=0.5, tie_word_embeddings=True),
])
def test_pythia_equals_transformers(change, tmp_path, tokens):
    transformers = pytest.importorskip('transformers')
    folder, _ = write_folder(tmp_path / 'theirs', dict(NEOX, **change))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager')
    theirs = theirs.eval()
    # in both ways to write config.json: the old keys, and those of the version installed
    theirs.save_pretrained(str(tmp_path / 'again'))
    for folder in folder, str(tmp_path / 'again'):
        with torch.no_grad():
            want = theirs(input_ids=tokens).logits
            assert torch.allclose(want, load_released(folder)(tokens)[0], atol=1e-4)


def test_a_mechanism_on_pythia_and_depth_attention_in_its_blocks(tmp_path, tokens):
    """What the blocks of model.py do, these do too: they share Attention."""
    folder, _ = write_folder(tmp_path, NEOX)
    state = load_checkpoint(f'hf:{folder}', GPTConfig)
    for settings in (
        dict(ponder='chain', ponder_steps=2),
        dict(ponder='loop', ponder_steps=1, depth_attn=True),
        dict(ponder='embedding', ponder_steps=1, depth_attn=True, depth_stride=1),
    ):
        state['config'].update(settings)
        model = sample.new_model(state, GPT, GPTConfig).double().eval()
        [row] = model.generate(tokens[:1, :4], 8, temperature=0)
        again = model(row[None, :-1])[0][0, 3:].argmax(-1)
        assert torch.equal(row[4:], again)


@pytest.mark.parametrize('steps', [0, 1, 2])
def test_fewer_steps_leave_the_input_as_it_was_trained(steps, tmp_path, tokens):
    folder, weights = write_folder(tmp_path, PONDER)
    model = load_released(folder).double()
    model.config.ponder_steps = steps
    # three times the input, whatever the steps: here with a table that is not multiplied
    c = dict(PONDER, pondering_steps=steps, mutiply_pondering_steps=False)
    embed = model.wte(tokens) * model.config.embed_scale
    table = weights['gpt_neox.embed_in.weight'].double() * math.sqrt(32)
    assert torch.allclose(embed, 3 * table[tokens], rtol=1e-6)
    if steps == 0:
        triple = dict(weights, **{'gpt_neox.embed_in.weight': 3 * table})
        want = logits(tokens, triple, dict(c, ponderinglm=False, scale_embeds=False))
        assert torch.allclose(model(tokens)[0], want, atol=1e-5)
    else:
        assert not torch.allclose(model(tokens)[0], logits(tokens, weights, c), atol=1e-3)


def test_bfloat16(tmp_path, tokens):
    folder, _ = write_folder(tmp_path, PONDER)
    model = load_released(folder, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(tokens)[0].isfinite().all()


# ---- config.json ---------------------------------------------------------------------------------

@pytest.mark.parametrize('c, change, key', [
    (DEPTH, dict(depth_attention_recent_window=2), 'depth_attention_recent_window=2'),
    (DEPTH, dict(recurrent_model=False), 'recurrent_model=False'),
    (DEPTH, dict(num_latent_thoughts=1), 'num_latent_thoughts=1'),
    (DEPTH, dict(cross_layer_mode='v0_mix'), 'cross_layer_mode'),
    (DEPTH, dict(baseline_mode='mhc'), 'baseline_mode'),
    (DEPTH, dict(model_type='qwen3'), 'use_depth_attention'),
    (DEPTH, dict(attention_bias=True), 'attention_bias'),
    (DEPTH, dict(mlp_bias=True), 'mlp_bias'),
    (DEPTH, dict(partial_rotary_factor=0.5), 'partial_rotary_factor'),
    (DEPTH, dict(hidden_act='gelu'), 'hidden_act'),
    (DEPTH, dict(layer_types=['sliding_attention'] * 5), 'layer_types'),
    (DEPTH, dict(use_depth_attention='yes'), 'use_depth_attention'),
    (DEPTH, dict(use_depth_attention=None, scale_embeds=1), 'scale_embeds'),
    (LATENT, dict(interpolation=True), 'interpolation'),
    (LATENT, dict(recurrent_model=False), 'num_latent_thoughts'),
    (LATENT, dict(num_latent_thoughts=None), 'num_latent_thoughts'),
    (LATENT, dict(num_jacobi_iterations=-1), 'jacobi_iters'),
    (PONDER, dict(recurrent_model=True), 'recurrent_model'),
    (PONDER, dict(use_depth_attention=True), 'use_depth_attention'),
    (PONDER, dict(pondering_steps=0), 'pondering_steps'),
    (PONDER, dict(pondering_steps='3'), 'pondering_steps'),
    (PONDER, dict(softmax_temperature=0.7), 'softmax_temperature'),
    (NEOX, dict(pondering_steps=3), 'pondering_steps'),
    (NEOX, dict(scale_embeds=True), 'scale_embeds'),
    (NEOX, dict(rope_scaling=dict(type='linear', factor=2.0)), 'rope_scaling'),
    (NEOX, dict(rope_parameters=dict(rope_type='yarn')), 'rope_parameters'),
    (NEOX, dict(rope_parameters=dict(full=dict(rope_theta=1e4))), 'rope_parameters'),
    (NEOX, dict(model_type='gptj'), 'model_type'),
    (NEOX, dict(model_type=['gpt_neox']), 'gpt_neox'),
    (NEOX, dict(quantization_config=dict(bits=4)), 'quantization_config'),
    (NEOX, dict(hidden_act='relu'), 'hidden_act'),
    (NEOX, dict(num_key_value_heads=1), 'num_key_value_heads'),
    (NEOX, dict(head_dim=8), 'head_dim'),
    (NEOX, dict(use_qk_norm=True), 'use_qk_norm'),
    (NEOX, dict(rotary_pct=0.0), 'rotary_pct'),
    (NEOX, dict(rotary_pct=0.2), 'rotary_pct'),
    (NEOX, dict(rotary_pct=2), 'rotary_pct'),
    (NEOX, dict(rotary_emb_base=-1), 'rotary_emb_base'),
    (NEOX, dict(num_attention_heads=0), 'not a usable'),
    (NEOX, dict(num_attention_heads=3), 'n_head'),
    (NEOX, dict(use_parallel_residual='no'), 'use_parallel_residual'),
    (NEOX, dict(vocab_size=None), 'vocab_size'),
])
def test_what_is_not_supported_is_one_line_that_names_the_key(c, change, key, tmp_path):
    write_json(tmp_path / 'config.json', {**c, **change})
    with pytest.raises(UserError, match=f'config.json: .*{key}') as error:
        load_released(str(tmp_path))
    assert '\n' not in str(error.value)


def test_keys_that_newer_files_have(tmp_path, tokens):
    rope = dict(rope_type='default', rope_theta=100, partial_rotary_factor=0.5)
    c = dict(NEOX, rotary_emb_base=100, rotary_pct=0.5)
    folder, weights = write_folder(tmp_path, c)
    newer = dict(c, rope_parameters=rope)
    for key in ('rotary_emb_base', 'rotary_pct', 'attention_bias', 'layer_norm_eps', 'hidden_act',
                'use_parallel_residual', 'tie_word_embeddings'):
        del newer[key]
    write_json(tmp_path / 'config.json', newer)
    got = load_released(folder).double()(tokens)[0]
    assert torch.allclose(got, logits(tokens, weights, c), atol=1e-6)


def test_a_plain_llama_norms_its_keys_first_and_qwen_too(tmp_path):
    for c, late in (
        (dict(DEPTH, use_depth_attention=False, use_qk_norm=False), False),
        (dict(DEPTH, use_depth_attention=False), True),
        (dict(DEPTH, use_depth_attention=False, model_type='qwen3'), False),
    ):
        folder, _ = write_folder(tmp_path, c)
        names = load_released(folder).state_dict().keys()
        assert ('h.0.attn.k_norm_late.weight' in names) == late


# ---- tensors -------------------------------------------------------------------------------------

def test_tensors_that_mean_nothing_are_ignored(tmp_path, tokens):
    weights = random_weights(PONDER)
    nothing = {
        'adapter.weight': torch.ones(32, 64),
        'gpt_neox.layers.0.attention.bias': torch.ones(1, 1, 4, 4, dtype=torch.bool),
        'gpt_neox.layers.0.attention.masked_bias': torch.tensor(-1e9),
        'gpt_neox.layers.1.attention.rotary_emb.inv_freq': torch.ones(2),
    }
    folder, _ = write_folder(tmp_path, PONDER, {**weights, **nothing})
    assert torch.allclose(load_released(folder).double()(tokens)[0],
                          logits(tokens, weights, PONDER), atol=1e-5)
    folder, _ = write_folder(tmp_path, DEPTH, {**random_weights(DEPTH),
                                               'lm_head_layernorm.weight': torch.ones(32)})
    load_released(folder)


@pytest.mark.parametrize('change, words', [
    ({'gpt_neox.layers.3.mlp.dense_h_to_4h.bias': (48,)}, "unknown tensor 'gpt_neox.layers.3.mlp"),
    ({'router.weight': (1, 32)}, "unknown tensor 'router.weight'"),
    ({'gpt_neox.layers.2.attention.dense.bias': None}, "no tensor 'gpt_neox.layers.2.attention"),
    ({'gpt_neox.embed_in.weight': (61, 32)}, r'embed_in.weight has shape \(61, 32\).*\(60, 32\)'),
    ({'gpt_neox.layers.1.mlp.dense_4h_to_h.weight': (48, 32)}, r'\(48, 32\).*says \(32, 48\)'),
    ({'gpt_neox.layers.0.attention.query_key_value.weight': (90, 32)}, r'\(90, 32\)'),
    ({'gpt_neox.final_layer_norm.bias': ()}, r'\(\), config.json says \(32,\)'),
])
def test_unknown_missing_and_misshapen_tensors(change, words, tmp_path):
    weights = random_weights(NEOX)
    for name, shape in change.items():
        weights.pop(name, None)
        if shape is not None:
            weights[name] = torch.ones(shape)
    folder, _ = write_folder(tmp_path, NEOX, weights)
    with pytest.raises(UserError, match=words):
        load_released(folder)


@pytest.mark.parametrize('change', [dict(num_hidden_layers=200), dict(num_hidden_layers=10 ** 9),
                                    dict(vocab_size=10 ** 12)])
def test_a_configuration_larger_than_its_weights(change, tmp_path):
    """Refused before memory or time is spent on a model of that size."""
    folder, _ = write_folder(tmp_path, NEOX)
    write_json(tmp_path / 'config.json', {**NEOX, **change})
    with pytest.raises(UserError, match=f'config.json.* .*{max(change.values())}'):
        load_released(folder)


def test_heads_that_are_divided_otherwise_than_config_says(tmp_path):
    """q, k and v together have the right number of rows, each alone has not."""
    weights = random_weights(DEPTH)
    weights['model.layers.0.self_attn.q_proj.weight'] = torch.ones(16, 32)
    weights['model.layers.0.self_attn.k_proj.weight'] = torch.ones(32, 32)
    folder, _ = write_folder(tmp_path, DEPTH, weights)
    with pytest.raises(UserError, match=r'q_proj.*\(16, 32\), config.json says \(32, 32\)'):
        load_released(folder)


def test_quantised_weights(tmp_path):
    weights = random_weights(NEOX)
    weights['gpt_neox.embed_in.weight'] = torch.ones(60, 32, dtype=torch.int8)
    folder, _ = write_folder(tmp_path, NEOX, weights)
    with pytest.raises(UserError, match='embed_in.weight has dtype I8'):
        load_released(folder)


def write_shards(folder, weights, n):
    """The same weights in n files and an index."""
    parts = [{} for _ in range(n)]
    names = [f'model-{i + 1:05d}-of-{n:05d}.safetensors' for i in range(n)]
    where = {}
    for i, (name, tensor) in enumerate(weights.items()):
        part = i * n // len(weights)
        parts[part][name] = tensor
        where[name] = names[part]
    for name, part in zip(names, parts):
        safetensors.torch.save_file(part, folder / name)
    write_json(folder / 'model.safetensors.index.json', dict(weight_map=where))


def test_shards(tmp_path, tokens):
    folder, weights = write_folder(tmp_path, NEOX)
    want = load_released(folder)(tokens)[0]
    os.remove(tmp_path / 'model.safetensors')
    write_shards(tmp_path, weights, 3)
    assert torch.equal(load_released(folder)(tokens)[0], want)

    os.remove(tmp_path / 'model-00002-of-00003.safetensors')
    with pytest.raises(UserError, match='model-00002-of-00003.safetensors is missing'):
        load_released(folder)
    write_json(tmp_path / 'model.safetensors.index.json', dict(weight_map=dict(a='../a.bin')))
    with pytest.raises(UserError, match='not an index of weights'):
        load_released(folder)


def test_the_same_tensor_in_two_files(tmp_path):
    folder, weights = write_folder(tmp_path, NEOX)
    safetensors.torch.save_file(weights, tmp_path / 'consolidated.safetensors')
    with pytest.raises(UserError, match='is in consolidated.safetensors and in model.safetensors'):
        load_released(folder)


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == 'cut':
        content = content[:-10]
    elif how == 'longer':
        content += b'x'
    elif how == 'header':
        content[8:12] = b'[[[['
    elif how == 'length':
        content[:8] = b'\xff' * 8
    elif how == 'empty':
        content = b''
    path.write_bytes(content)


@pytest.mark.parametrize('how', ['cut', 'longer', 'header', 'length', 'empty'])
def test_damaged_files(how, tmp_path):
    folder, _ = write_folder(tmp_path, NEOX)
    damage(tmp_path / 'model.safetensors', how)
    with pytest.raises(UserError, match='model.safetensors: damaged'):
        load_released(folder)


@pytest.mark.parametrize('entry', [
    dict(dtype='F32', shape=[2, 2], data_offsets=[0, 12]),
    dict(dtype='F32', shape=[-1, -4], data_offsets=[0, 16]),
    dict(dtype='F32', shape=[4], data_offsets=[0, 16.0]),
    dict(dtype='F32', shape=[4], data_offsets=[16]),
    dict(dtype='F32', shape=None, data_offsets=[0, 16]),
    dict(shape=[4], data_offsets=[0, 16]),
    [],
])
def test_headers_that_lie(entry, tmp_path):
    header = json.dumps({'a': entry}).encode()
    path = tmp_path / 'model.safetensors'
    path.write_bytes(len(header).to_bytes(8, 'little') + header + bytes(16))
    with pytest.raises(UserError, match='damaged'):
        open_tensors(str(tmp_path))


class Evil:
    """Unpickled by anything that executes what it reads, it leaves a file."""

    def __reduce__(self):
        return os.mkdir, ('executed',)


@pytest.mark.parametrize('older', [False, True])
def test_pytorch_model_bin(older, tmp_path, tokens, monkeypatch):
    folder, weights = write_folder(tmp_path / 'model', LATENT)
    want = load_released(folder)(tokens)[0]
    os.remove(tmp_path / 'model' / 'model.safetensors')
    path = tmp_path / 'model' / 'pytorch_model.bin'
    torch.save(weights, path, _use_new_zipfile_serialization=not older)
    assert torch.equal(load_released(folder)(tokens)[0], want)

    monkeypatch.chdir(tmp_path)
    for content in Evil(), [1, 2], {'gpt_neox.embed_in.weight': 'text'}:
        torch.save(content, path, _use_new_zipfile_serialization=not older)
        with pytest.raises(UserError, match='pytorch_model.bin: damaged, or not a file of weights'):
            load_released(folder)
    assert not os.path.exists('executed')


def test_without_weights(tmp_path):
    write_json(tmp_path / 'config.json', NEOX)
    with pytest.raises(UserError, match='no weights'):
        load_released(str(tmp_path))


MEASURE = """
import sys, torch
from tools.hf import load_released

def peak():
    for line in open('/proc/self/status'):
        if line.startswith('VmHWM:'):
            return int(line.split()[1]) * 1024

load_released(sys.argv[1])  # imports and first allocations
before = peak()
model = load_released(sys.argv[2], getattr(torch, sys.argv[3]))
after = peak()
size = sum(p.numel() * p.element_size() for p in model.parameters())
print((after - before) / size, size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='needs /proc')
@pytest.mark.parametrize('stored, dtype', [
    ('float32', 'float32'),
    ('bfloat16', 'float32'),
    ('float32', 'bfloat16'),
])
def test_loading_takes_little_more_memory_than_the_model(stored, dtype, tmp_path):
    """200 MB of weights; what is mapped into memory would count, too."""
    small, _ = write_folder(tmp_path / 'small', NEOX)
    c = dict(PONDER, hidden_size=768, intermediate_size=3072, num_attention_heads=12,
             num_hidden_layers=6 if dtype == stored else 12, vocab_size=5000)
    large, _ = write_folder(tmp_path / 'large', c, random_weights(c, getattr(torch, stored)))
    done = subprocess.run([sys.executable, '-c', MEASURE, small, large, dtype], text=True,
                          capture_output=True, cwd=ROOT, timeout=120,
                          env={**os.environ, 'PYTHONPATH': os.path.join(ROOT, 'tests')})
    assert done.returncode == 0, done.stderr
    share, size = map(float, done.stdout.split())
    assert size > 180e6
    assert 0.8 < share < 1.3


def test_numbers_are_converted_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, 'PIECE', 7)
    weights = random_weights(NEOX, torch.bfloat16)
    folder, _ = write_folder(tmp_path, NEOX, weights)
    model = load_released(folder)
    assert torch.equal(model.lm_head.weight, weights['embed_out.weight'].float())


# ---- the programs --------------------------------------------------------------------------------

# as many rows as the tokenizer of these folders has tokens, and some more
ROWS = dict(vocab_size=270, max_position_embeddings=64)


@pytest.fixture
def ponder_folder(tmp_path):
    return 'hf:' + write_folder(tmp_path / 'ponder', dict(PONDER, **ROWS), tokenizer=True)[0]


def test_sample(ponder_folder, capsys):
    common = [ponder_folder, '--start=hello  he', '--max_new_tokens=5', '--temperature=0']
    for steps, passes in (None, 4), (0, 1), (1, 2), (3, 4):
        sample.main(common + ([] if steps is None else [f'--ponder_steps={steps}']))
        out, err = capsys.readouterr()
        assert out.startswith('hello  he')
        assert f"{passes}.00 passes per token" in err
    sample.main([ponder_folder, '--max_new_tokens=3'])      # from a document's start


def test_evaluate_explain_and_plot(ponder_folder, tmp_path, capsys, threads):
    text = tmp_path / 'a.txt'
    text.write_text('hello   hello ' * 20)
    evaluate.main([ponder_folder, str(text), '--device=cpu'])
    assert 'nats per token' in capsys.readouterr().out
    with pytest.raises(UserError, match='no validation set'):
        evaluate.main([ponder_folder, '--device=cpu'])

    explain.main([ponder_folder, '--start=hello'])
    assert 'after pass 4' in capsys.readouterr().out
    depth, _ = write_folder(tmp_path / 'depth', dict(DEPTH, **ROWS), tokenizer=True)
    explain.main([f'hf:{depth}', '--start=hello'])
    assert 'values from' in capsys.readouterr().out

    pytest.importorskip('matplotlib')
    plot.main(['ponder', ponder_folder, f'--start=FILE:{text}', f'--out={tmp_path / "p.png"}'])
    plot.main(['depth', f'hf:{depth}', f'--start=FILE:{text}', f'--out={tmp_path / "d.png"}'])
    assert os.path.getsize(tmp_path / 'p.png') > 1000
    assert os.path.getsize(tmp_path / 'd.png') > 1000


def test_without_a_tokenizer(tmp_path):
    folder, _ = write_folder(tmp_path, NEOX)
    with pytest.raises(UserError, match='no tokenizer.json'):
        sample.main([f'hf:{folder}', '--start=a'])


def test_training_goes_on_from_such_a_model(ponder_folder, tmp_path, monkeypatch, capsys, threads):
    """Its checkpoint is one of this program, which resumes, samples and is planned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'text.txt').write_text(''.join(f'hello  he said {i}\n' for i in range(400)))
    train.prepare_data.main(['text.txt', '--name=mine', f'--tokenizer={ponder_folder}',
                             '--val_fraction=0.3'])
    common = ['--data_dir=data/mine', '--block_size=16', '--micro_batch=2', '--batch_tokens=32',
              '--sample_tokens=0', '--eval_tokens=32', '--device=cpu', '--dtype=float32']
    start = [f'--init_from={ponder_folder}', '--out_dir=out', '--learning_rate=1e-9', *common]
    train.main(['--max_steps=1', *start])
    state = load_checkpoint('out', GPTConfig)
    assert state['variant']['input_factor'] == 3
    assert state['tokenizer'] == ponder_folder

    model, tokenizer, _ = sample.load_model('out', 'cpu')
    idx = torch.tensor([tokenizer.encode_ordinary('hello  he')])
    before = load_released(ponder_folder[3:])
    assert torch.allclose(model(idx)[0], before(idx)[0], atol=1e-4)

    train.main(['--init_from=resume', '--out_dir=out', '--max_steps=2'])
    assert load_checkpoint('out', GPTConfig)['step'] == 2
    capsys.readouterr()
    train.main([*start, '--dry_run=True'])
    planned = capsys.readouterr().out
    assert f"{before.num_params() / 1e6:,.2f}M" in planned


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The checkpoint of a step from a PonderLM on Pythia, in memory of its own."""
    base = tmp_path_factory.mktemp('trained')
    folder, _ = write_folder(base / 'ponder', dict(PONDER, **ROWS), tokenizer=True)
    text = base / 'text.txt'
    text.write_text(''.join(f'hello  he said {i}\n' for i in range(400)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        train.prepare_data.main([str(text), '--name=mine', f'--tokenizer=hf:{folder}'])
        train.main([f'--init_from=hf:{folder}', '--out_dir=out', '--max_steps=1', '--device=cpu',
                    f'--data_dir={base}/data/mine', '--block_size=16', '--micro_batch=2',
                    '--batch_tokens=32', '--sample_tokens=0', '--eval_tokens=32'])
    return copy.deepcopy(load_checkpoint(str(base / 'out'), GPTConfig))


BIAS = 'h.1.attn.c_attn.bias'


@pytest.mark.parametrize('name, value', [
    ('neox', False), ('neox', 1), ('neox', None), ('rotary_dim', 0), ('rotary_dim', 3),
    ('rotary_dim', 10 ** 6), ('rotary_dim', '4'), ('gelu', 'relu'), ('gelu', 3),
    ('attention_bias', False), ('input_factor', math.nan), ('input_factor', 'x'),
    ('telepathy', True),
])
def test_variants_that_were_never_saved(trained, tmp_path, name, value):
    variant = {**trained['variant'], name: value}
    torch.save({**trained, 'variant': variant}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a checkpoint') as error:
        load_checkpoint(str(tmp_path), GPTConfig)
    line = str(error.value)
    assert name in line or 'model.h.' in line or 'model.ln_f' in line
    assert '\n' not in line and 'NoneType' not in line


@pytest.mark.parametrize('variant', [None, [], 'neox', {3: 4}, {}])
def test_variants_of_another_kind(trained, tmp_path, variant):
    torch.save({**trained, 'variant': variant}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='variant|model.ln_f|model.h.'):
        load_checkpoint(str(tmp_path), GPTConfig)


@pytest.mark.parametrize('tensor', [None, torch.zeros(95), torch.full((96,), math.nan)])
def test_weights_of_a_variant_are_checked(trained, tmp_path, tensor):
    model = {name: weight for name, weight in trained['model'].items() if name != BIAS}
    if tensor is not None:
        model[BIAS] = tensor
    torch.save({**trained, 'model': model}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=BIAS):
        load_checkpoint(str(tmp_path), GPTConfig)


def test_moments_of_a_variant_are_checked(trained, tmp_path):
    state = copy.deepcopy(trained)
    state['optimizer']['state'][0]['exp_avg'] = torch.zeros(3)
    torch.save(state, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='optimizer.wte.weight.exp_avg has the shape'):
        load_checkpoint(str(tmp_path), GPTConfig)


def test_a_variant_resumes(trained, tmp_path):
    torch.save(trained, tmp_path / 'ckpt.pt')
    train.main(['--init_from=resume', f'--out_dir={tmp_path}', '--max_steps=2'])
    after = load_checkpoint(str(tmp_path), GPTConfig)
    assert after['step'] == 2 and after['variant'] == trained['variant']


def test_weights_that_are_not_finite(tmp_path):
    folder, weights = write_folder(tmp_path, NEOX)
    weights['embed_out.weight'][3, 5] = math.inf
    safetensors.torch.save_file(weights, os.path.join(folder, 'model.safetensors'))
    with pytest.raises(UserError, match='lm_head.weight is not finite'):
        load_released(folder)


def test_weights_that_do_not_fit_into_memory(ponder_folder, monkeypatch):
    """They are not read, and those that are in memory already are not counted twice."""
    size = 4 * load_released(ponder_folder[3:]).num_params()
    monkeypatch.setattr(room, 'memory_of', lambda device: size - 1)
    monkeypatch.setattr(tensors.SafeTensor, 'copy_into', None)
    with pytest.raises(UserError, match='loading this model takes 0.0 GB'):
        sample.load_model(ponder_folder, 'cpu')
    monkeypatch.undo()
    free = iter([size])
    monkeypatch.setattr(room, 'memory_of', lambda device: next(free))
    sample.load_model(ponder_folder, 'cpu')


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path):
    few = dict(PONDER, **{**ROWS, 'vocab_size': 200})
    folder, _ = write_folder(tmp_path, few, tokenizer=True)
    with pytest.raises(UserError, match='tokens, the model 200'):
        sample.load_model(f'hf:{folder}', 'cpu')


@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='needs pipes')
@pytest.mark.parametrize('name', ['config.json', 'tokenizer.json', 'model.safetensors'])
def test_pipes_in_the_place_of_files(name, ponder_folder):
    path = os.path.join(ponder_folder[3:], name)
    os.remove(path)
    os.mkfifo(path)
    with pytest.raises(UserError, match=f'{name}: a pipe'):
        sample.load_model(ponder_folder, 'cpu')


def test_such_models_are_not_exported(tmp_path):
    for c in NEOX, DEPTH, PONDER:
        folder, _ = write_folder(tmp_path / 'in', c)
        with pytest.raises(UserError, match='only plain models'):
            hf.save_hf(load_released(folder), str(tmp_path / 'out'))
    assert not (tmp_path / 'out').exists()


def test_checkpoints_without_a_variant_load_as_before(tmp_path, tokens):
    model = GPT(GPTConfig(vocab_size=320, n_tokens=257, block_size=16, n_layer=2, n_head=2,
                          n_embd=8, mlp_hidden=16, tie_embeddings=True)).eval()
    folder = save(tmp_path, model)
    loaded, *_ = sample.load_model(folder, 'cpu')
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])
    assert loaded.lm_head.weight is loaded.wte.weight
