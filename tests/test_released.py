"""
Models that others released: their folders read, compared with transformers and with slow loops,
decoded exactly, put through the programs, or refused in one line; and plain models written as such
folders.
"""

import json
import math
import os
import re
import shutil
import sys

import pytest
import safetensors.torch
import torch
from conftest import Evil, make, save
from released import (DEPTH, LATENT, LLAMA, NEOX, OURO, PONDER, TOKENIZER, added, llama_trunk, ouro,
                      random_weights, write_folder, write_json)

import sample
import train
from engine import checkpoint
from engine.checkpoint import change_steps, load_checkpoint, model_of
from engine.files import UserError
from engine.generate import check_pieces, generate
from engine.released import FolderTokenizer, describe
from engine.shards import encode, get_tokenizer, identity, one_tokenizer
from engine.trained import load_model
from prepare_data import write_dataset
from tools import evaluate, hf
from tools.hf import load_released, save_hf


@pytest.fixture
def tokens():
    """(2,9)"""
    with torch.no_grad():
        yield torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(1))


def close(ours, theirs):
    assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max()


def theirs_of(folder):
    """The model of the transformers library."""
    transformers = pytest.importorskip('transformers')
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager')
    return model.double().eval()


# ---- what they compute ---------------------------------------------------------------------------

@pytest.mark.parametrize('change', [
    dict(),
    dict(use_parallel_residual=False, layer_norm_eps=1e-2, rotary_emb_base=100),
    dict(attention_bias=False, hidden_act='gelu_new', rotary_pct=0.5, tie_word_embeddings=True),
    dict(rotary_pct=1.0),
    dict.fromkeys(('rotary_pct', 'rotary_emb_base', 'layer_norm_eps', 'use_parallel_residual',
                   'attention_bias', 'hidden_act')),     # None: not in the file
])
def test_pythia_equals_transformers(change, tmp_path, tokens):
    c = {key: value for key, value in dict(NEOX, **change).items() if value is not None}
    folder, _ = write_folder(tmp_path / 'theirs', c, random_weights({**NEOX, **c}))
    theirs = theirs_of(folder)
    # in both ways to write config.json: the old keys, and those of the version installed
    theirs.float().save_pretrained(str(tmp_path / 'again'))
    theirs.double()
    for folder in folder, str(tmp_path / 'again'):
        model = load_released(folder).double()
        close(model(tokens)[0], theirs(input_ids=tokens).logits)


@pytest.mark.parametrize('settings', [
    dict(),
    dict(n_kv_head=2, tie_embeddings=True),
    dict(qk_norm=False, n_kv_head=1, head_dim=16, rope_theta=1e6, norm_eps=1e-3),
])
def test_plain_models_there_and_back_equal_transformers(settings, tmp_path, idx):
    model = make(**settings)
    save_hf(model.float(), str(tmp_path), 'byte')
    with torch.no_grad():
        want = model.double()(idx)[0][..., :50]     # the rows of padding are left out
        close(load_released(str(tmp_path)).double()(idx)[0], want)
        close(want, theirs_of(str(tmp_path))(input_ids=idx).logits)


@pytest.mark.parametrize('c', [
    PONDER,
    dict(PONDER, mutiply_pondering_steps=False, scale_embeds=False, pondering_steps=2),
    dict(PONDER, tie_word_embeddings=True, use_parallel_residual=False),
])
def test_ponderlm_is_a_loop_over_pythia(c, tmp_path, tokens):
    folder, weights = write_folder(tmp_path, c)
    model = load_released(folder).double()
    theirs = theirs_of(folder)
    table = weights['gpt_neox.embed_in.weight'].double() * (32 ** 0.5 if c['scale_embeds'] else 1)
    x = table[tokens] * (c['pondering_steps'] if c['mutiply_pondering_steps'] else 1)
    for steps in range(c['pondering_steps'] + 1):
        want = theirs(inputs_embeds=x).logits
        change_steps(model, steps)          # which leaves the factor on the input
        close(model(tokens)[0], want)
        x = x + want.softmax(-1) @ table


@pytest.mark.parametrize('K, R, scaled', [(1, 3, True), (2, 2, False)])
def test_ponderlm2_is_jacobi_iteration_over_pythia(K, R, scaled, tmp_path, tokens):
    c = dict(LATENT, num_latent_thoughts=K, num_jacobi_iterations=R, scale_embeds=scaled)
    folder, weights = write_folder(tmp_path, c)
    theirs = theirs_of(folder)
    table = weights['gpt_neox.embed_in.weight'].double() * (math.sqrt(2.5 * 32) if scaled else 1)
    slots = [table[tokens]]
    for _ in range(K + R + 1):
        n = len(slots)
        pos = torch.arange(9).repeat_interleave(n)[None]
        out = theirs(inputs_embeds=torch.stack(slots, 2).flatten(1, 2), position_ids=pos,
                     output_hidden_states=True)
        h = out.hidden_states[-1].unflatten(1, (9, n)).unbind(2)
        slots = [slots[0], *h[:K]]
    close(load_released(folder).double()(tokens)[0], out.logits[:, K::K + 1])


@pytest.mark.parametrize('c', [
    DEPTH,
    dict(DEPTH, depth_attention_stride=1, scale_embeds=True, num_key_value_heads=1),
    dict(DEPTH, use_qk_norm=False),
    dict(DEPTH, use_depth_attention=False),
])
def test_depth_attention_equals_a_slow_loop(c, tmp_path, tokens):
    folder, weights = write_folder(tmp_path, c)
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w['model.embed_tokens.weight'][tokens] * (32 ** 0.5 if c['scale_embeds'] else 1)
    want = llama_trunk(x, w, c) @ w['lm_head.weight'].T
    close(load_released(folder).double()(tokens)[0], want)


@pytest.mark.parametrize('c', [PONDER, LATENT, DEPTH, OURO, dict(OURO, early_exit_threshold=0.5)])
def test_cached_generation_equals_recomputing(c, tmp_path, tokens):
    folder, _ = write_folder(tmp_path, c)
    model = load_released(folder).double()
    latent = model.config.ponder == 'latent'
    cached = generate(model, tokens[:, :4], 5, temperature=0, exact=latent)
    model.config.jacobi_iters = 9                   # enough to be exact
    seen = tokens[:, :4]
    for _ in range(5):
        seen = torch.cat((seen, model(seen)[0][:, -1:].argmax(-1)), 1)
    assert torch.equal(cached, seen)


def test_prompts_of_one_length_only_where_keys_depend_on_where_a_text_begins(tmp_path, capsys):
    folder, _ = write_folder(tmp_path, DEPTH)
    model = load_released(folder)
    with pytest.raises(ValueError, match='give one prompt at a time'):
        generate(model, [[3, 1, 4], [1, 5]], 1)
    assert [len(row) for row in generate(model, [[3, 1, 4], [1, 5, 9]], 1)] == [4, 4]
    check_pieces(model)
    assert capsys.readouterr().err == ''


def test_mechanisms_and_depth_attention_in_the_blocks_of_pythia(tmp_path, tokens):
    """What the blocks of model.py do, these do too."""
    state = load_checkpoint('hf:' + write_folder(tmp_path, NEOX)[0])
    for settings in (
        dict(ponder='chain', ponder_steps=2),
        dict(ponder='loop', ponder_steps=1, depth_attn=True, depth_stride=1),
    ):
        state['config'].update(settings)
        model = model_of(state).double().eval()
        [row] = generate(model, tokens[:1, :4], 8, temperature=0)
        assert torch.equal(row[4:], model(row[None, :-1])[0][0, 3:].argmax(-1))
    mixed = model(tokens)[0]
    model.config.depth_attn = False
    assert not torch.allclose(mixed, model(tokens)[0])


# ---- Ouro ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('tied', [False, True])
def test_ouro_equals_a_slow_loop_pass_by_pass(tied, tmp_path, tokens):
    c = dict(OURO, tie_word_embeddings=tied)
    folder, weights = write_folder(tmp_path, c)
    w = {name: tensor.double() for name, tensor in weights.items()}
    logits, p, _ = ouro(tokens, w, c)
    model = load_released(folder).double()
    close(model(tokens)[0], logits[-1])             # its threshold of 1.0 means all passes
    assert (model.mechanism.passes == 4).all()
    close(torch.stack([model.head(h) for h in model.mechanism.kept.h]), torch.stack(logits))
    scores = model.mechanism.kept.scores
    stay = torch.stack([torch.ones_like(p[0]), *scores, torch.zeros_like(p[0])])
    close(stay[:-1] - stay[1:], torch.stack(p))


@pytest.mark.parametrize('threshold', [0.3, 0.7, 0.95])
def test_ouro_leaves_where_its_threshold_says(threshold, tmp_path):
    """Texts of one token: what later ones read of a token that left is our own rule."""
    c = dict(OURO, early_exit_threshold=threshold)
    folder, weights = write_folder(tmp_path, c)
    ids = torch.arange(40)[:, None]
    with torch.no_grad():
        logits, _, last = ouro(ids, {name: t.double() for name, t in weights.items()}, c)
        model = load_released(folder).double()
        got = model(ids)[0]
    assert torch.equal(model.mechanism.passes, last + 1)
    assert len(last.unique()) > 1
    close(got[:, 0], torch.stack(logits)[last[:, 0], range(40), 0])


@pytest.fixture(scope='module')
def ouro_folder(tmp_path_factory):
    return 'hf:' + write_folder(tmp_path_factory.mktemp('ouro'), OURO, tokenizer=True)[0]


def test_sample_shows_the_passes(ouro_folder, capsys):
    sample.main([ouro_folder, '--start=hello', '--max_new_tokens=20', '--seed=3', '--device=cpu',
                 '--dtype=bfloat16', '--show_steps=True', '--halt_tau=0.2'])
    said = capsys.readouterr()
    assert 1 < float(said.err.split(' passes per token')[0].split()[-1]) < 4
    assert len(set(re.findall(r'48;5;(\d+)m', said.out))) > 1


def test_training_on_trains_the_gate_alone(ouro_folder, tmp_path):
    tokenizer = get_tokenizer(ouro_folder)
    texts = [b'hello  he said %d\n' % i for i in range(400)]
    write_dataset(str(tmp_path / 'data'), texts, tokenizer, 0.3, 'test')
    train.main([f'--init_from={ouro_folder}', f'--data_dir={tmp_path / "data"}',
                f'--out_dir={tmp_path / "out"}', '--max_steps=2', '--block_size=16',
                '--micro_batch=2', '--batch_tokens=32', '--sample_tokens=0', '--eval_tokens=32',
                '--device=cpu', '--warmup=0'])
    before, after = load_checkpoint(ouro_folder), load_checkpoint(str(tmp_path / 'out'))
    assert after['config']['variant'] == before['config']['variant']
    assert after['tokenizer'] == ouro_folder
    changed = {name for name, weight in before['model'].items()
               if not torch.equal(weight, after['model'][name])}
    assert changed == {'mechanism.gate.weight', 'mechanism.gate.bias'}


def other_tokens(folder, name):
    """Another folder, whose tokenizer has as many tokens, in another order."""
    other = str(folder / name)
    write_folder(other, OURO, tokenizer=True)
    vocab = TOKENIZER['model']['vocab']
    swapped = {**vocab, 'e': vocab['t'], 't': vocab['e']}
    write_json(os.path.join(other, 'tokenizer.json'),
               {**TOKENIZER, 'model': {**TOKENIZER['model'], 'vocab': swapped}})
    return f'hf:{other}'


def data_of(tokenizer, folder):
    """A data folder with these tokens."""
    texts = [b'hello  he said %d\n' % i for i in range(400)]
    write_dataset(str(folder), texts, get_tokenizer(tokenizer), 0.3, 'test')
    return str(folder)


def test_another_tokenizer_of_as_many_tokens_is_refused(ouro_folder, tmp_path):
    family = str(tmp_path / 'family')
    write_folder(family, OURO, tokenizer=True)
    own, other = f'hf:{family}', other_tokens(tmp_path, 'other')
    data, other_data = data_of(own, tmp_path / 'data'), data_of(other, tmp_path / 'other_data')
    run = [f'--out_dir={tmp_path / "out"}', '--max_steps=1', '--block_size=16', '--micro_batch=2',
           '--batch_tokens=32', '--sample_tokens=0', '--eval_tokens=32', '--device=cpu']
    start = f'--init_from={ouro_folder}'    # the same tokens, in another folder
    with pytest.raises(UserError, match='other.*use the data the model was made for'):
        train.main([*run, start, f'--data_dir={other_data}'])
    train.main([*run, start, f'--data_dir={data}'])
    out = str(tmp_path / 'out')
    with pytest.raises(UserError, match='other.*use the data the model was made for'):
        train.main([*run, '--init_from=resume', '--max_steps=2', f'--data_dir={other_data}'])
    with pytest.raises(UserError, match='other_data has tokens of .* that are not those of'):
        evaluate.main([out, other_data, '--device=cpu'])
    evaluate.main([out, data_of(ouro_folder, tmp_path / 'ouro_data'), '--device=cpu'])

    # and one that lies in its place
    older = {'tokenizer': own}      # than the names of their tokens
    kept = dict(older, tokenizer_id=get_tokenizer(own).id)
    assert one_tokenizer(older, kept) and one_tokenizer(kept, older) and one_tokenizer(older, older)
    shutil.copy(tmp_path / 'other' / 'tokenizer.json', family)
    with pytest.raises(UserError, match='lies another tokenizer than this model was trained with'):
        sample.main([out, '--device=cpu', '--max_new_tokens=1'])
    with pytest.raises(UserError, match='use the data the model was made for'):
        train.main([*run, f'--init_from={own}', f'--data_dir={data}', f'--out_dir={out}2'])
    assert not one_tokenizer(older, kept) and not one_tokenizer(kept, older)
    data_of(own, tmp_path / 'data')
    with pytest.raises(UserError, match='use the data the model was made for'):
        train.main([*run, '--init_from=resume', '--max_steps=2'])


def with_tokenizer(tmp_path, name, **fields):
    """The folder of a model whose tokenizer.json has other fields."""
    folder = str(tmp_path / name)
    write_folder(folder, OURO, tokenizer=True)
    model = {**TOKENIZER['model'], **fields.pop('model', {})}
    write_json(os.path.join(folder, 'tokenizer.json'), {**TOKENIZER, **fields, 'model': model})
    return f'hf:{folder}'


ADDED = TOKENIZER['added_tokens']
BYTES = TOKENIZER['pre_tokenizer']
MERGES = TOKENIZER['model']['merges']


@pytest.mark.parametrize('fields', [
    dict(added_tokens=[*ADDED[:-1], added(263, '<|end|>')]),
    dict(added_tokens=[*ADDED[:-1], added(263, '<|padding|>', special=False)]),
    dict(added_tokens=[*ADDED[:2], added(262, 'he said'), *ADDED[3:]]),
    dict(normalizer=None),
    dict(normalizer=dict(type='Lowercase')),
    dict(pre_tokenizer=dict(BYTES, add_prefix_space=True)),
    dict(pre_tokenizer=dict(type='Sequence', pretokenizers=[
        dict(type='Digits', individual_digits=True), BYTES])),
    dict(model=dict(merges=[*MERGES[1:2], *MERGES[:1], *MERGES[2:]])),
    dict(model=dict(ignore_merges=True)),
])
def test_a_tokenizer_is_all_that_decides_what_a_number_means(fields, tmp_path):
    own, other = with_tokenizer(tmp_path, 'own'), with_tokenizer(tmp_path, 'other', **fields)
    assert not one_tokenizer(*(identity(get_tokenizer(name)) for name in (own, other)))

    # and where a run kept the tokens alone, as older ones did
    older = {'tokenizer': own, 'tokenizer_id': get_tokenizer(own).id.split('+')[0]}
    assert one_tokenizer(older, identity(get_tokenizer(own))) and one_tokenizer(older, older)
    assert not one_tokenizer(older, identity(get_tokenizer(other)))


@pytest.mark.parametrize('fields', [
    dict(padding=dict(strategy='BatchLongest', direction='Right', pad_to_multiple_of=None,
                      pad_id=0, pad_type_id=0, pad_token='<|padding|>')),
    dict(padding=dict(strategy=dict(Fixed=64), direction='Right', pad_to_multiple_of=None, pad_id=0,
                      pad_type_id=0, pad_token='<|padding|>')),
    dict(truncation=dict(direction='Right', max_length=9, strategy='LongestFirst', stride=0)),
    dict(post_processor=dict(type='ByteLevel', add_prefix_space=True, trim_offsets=True)),
    dict(pre_tokenizer=dict(BYTES, trim_offsets=False)),
    dict(pre_tokenizer=dict(BYTES, use_regex=True)),
    dict(model=dict(merges=[merge.split() for merge in MERGES])),
    dict(model=dict(unk_token=None, continuing_subword_prefix='', fuse_unk=False)),
])
def test_what_changes_no_number_is_the_same_tokenizer(fields, tmp_path):
    own, other = with_tokenizer(tmp_path, 'own'), with_tokenizer(tmp_path, 'other', **fields)
    own, other = get_tokenizer(own), get_tokenizer(other)
    assert one_tokenizer(identity(own), identity(other))
    for text in ('a', 'def f(x): return x\n' * 9):
        assert own.encode_ordinary(text) == other.encode_ordinary(text)


@pytest.mark.parametrize('kind', ['safetensors', 'bin'])
def test_a_model_is_its_own_whatever_is_copied_over_its_files(kind, tmp_path, monkeypatch):
    weights = random_weights(LLAMA)
    folder, _ = write_folder(tmp_path / 'theirs', LLAMA, weights, tokenizer=True)
    path = os.path.join(folder, 'model.safetensors')
    other = safetensors.torch.save({name: -w for name, w in weights.items()})
    if kind == 'bin':
        os.remove(path)
        path = os.path.join(folder, 'pytorch_model.bin')
        torch.save({name: -w for name, w in weights.items()}, path)
        with open(path, 'rb') as f:
            other = f.read()
        torch.save(weights, path)

    def write_over():
        with open(path, 'r+b') as f:        # as cp does: the same file, with other numbers
            f.write(other)

    readers = (load_model(f'hf:{folder}', 'cpu')[0].state_dict(),
               load_released(folder).state_dict())
    before = {name: w.clone() for name, w in readers[0].items()}
    write_over()
    for reader in readers:
        for name, weight in before.items():
            assert torch.equal(weight, reader[name])

    load_weights = checkpoint.load_weights
    monkeypatch.setattr('engine.checkpoint.load_weights',
                        lambda *args, **options: (load_weights(*args, **options), write_over()))
    with pytest.raises(UserError, match=f'{os.path.basename(path)}: written over while it was'):
        load_released(folder)


# ---- what is refused -----------------------------------------------------------------------------

@pytest.mark.parametrize('c, change, key', [
    (LLAMA, dict(model_type='gpt2'), 'model_type'),
    (LLAMA, dict(attention_bias=True), 'attention_bias'),
    (LLAMA, dict(rope_scaling=dict(rope_type='yarn')), 'rope_type'),
    (LLAMA, dict(rope_parameters=dict(rope_type='llama3', rope_theta=5e5)), 'rope_type'),
    (LLAMA, dict(layer_types=['sliding_attention'] * 4), 'layer_types'),
    (LLAMA, dict(quantization_config=dict(bits=4)), 'quantization_config'),
    (DEPTH, dict(depth_attention_recent_window=2), 'depth_attention_recent_window'),
    (DEPTH, dict(recurrent_model=False), 'recurrent_model'),
    (PONDER, dict(softmax_temperature=0.7), 'softmax_temperature'),
    (NEOX, dict(pondering_steps=3), 'pondering_steps'),
    (NEOX, dict(hidden_act='relu'), 'hidden_act'),
])
def test_what_is_not_supported_names_the_key(c, change, key, tmp_path):
    write_json(tmp_path / 'config.json', c)
    describe(str(tmp_path))
    write_json(tmp_path / 'config.json', {**c, **change})
    with pytest.raises(UserError, match=f'config.json: {key}='):
        describe(str(tmp_path))


def test_a_folder_that_is_not_there_names_the_command_that_fetches_it(tmp_path):
    for folder, words in [
        ('ByteDance/Ouro-1.4B', '-r requirements-hf.txt && hf download ByteDance/Ouro-1.4B '
                                '--local-dir models/Ouro-1.4B, .* hf:models/Ouro-1.4B$'),
        (str(tmp_path / 'nowhere'), 'no such folder$'),
        (str(tmp_path), 'config.json: not readable'),
    ]:
        with pytest.raises(UserError, match=words):
            load_released(folder)


@pytest.mark.parametrize('package', ['safetensors', 'tokenizers'])
def test_a_missing_package_names_the_install(package, ouro_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match='pip install -r requirements-hf.txt'):
        load_released(ouro_folder[3:])
        get_tokenizer(ouro_folder)


@pytest.mark.parametrize('name, shape, words', [
    ('gpt_neox.layers.3.mlp.dense_h_to_4h.bias', (48,), 'unknown tensor gpt_neox.layers.3.mlp'),
    ('gpt_neox.layers.2.attention.dense.bias', None, 'no tensor gpt_neox.layers.2.attention'),
    ('gpt_neox.embed_in.weight', (61, 32), r'embed_in.weight.*\(61, 32\).*says \(270, 32\)'),
])
def test_tensors_that_config_does_not_say(name, shape, words, tmp_path):
    nothing = {'adapter.weight': torch.ones(32, 64),
               'gpt_neox.layers.0.attention.bias': torch.ones(1, 1, 4, 4, dtype=torch.bool)}
    folder, weights = write_folder(tmp_path, NEOX, {**random_weights(NEOX), **nothing})
    load_released(folder)                   # no computation reads those two
    weights.pop(name, None)
    if shape:
        weights[name] = torch.ones(shape)
    write_folder(tmp_path, NEOX, weights)
    with pytest.raises(UserError, match=words):
        load_released(folder)


# ---- files of weights ----------------------------------------------------------------------------

def test_weights_in_several_files(tmp_path, tokens):
    folder, weights = write_folder(tmp_path, NEOX)
    want = load_released(folder)(tokens)[0]
    os.remove(tmp_path / 'model.safetensors')
    names = [f'model-{i}-of-3.safetensors' for i in range(3)]
    where = {name: names[i % 3] for i, name in enumerate(weights)}
    for file in names:
        part = {name: weights[name] for name in weights if where[name] == file}
        safetensors.torch.save_file(part, tmp_path / file)
    write_json(tmp_path / 'model.safetensors.index.json', dict(weight_map=where))
    assert torch.equal(load_released(folder)(tokens)[0], want)

    os.remove(tmp_path / names[1])
    with pytest.raises(UserError, match='model-1-of-3.safetensors: missing'):
        load_released(folder)


def test_a_download_that_was_cut(tmp_path):
    folder, _ = write_folder(tmp_path, NEOX)
    path = tmp_path / 'model.safetensors'
    with open(path, 'r+b') as f:
        f.truncate(path.stat().st_size - 10)
    with pytest.raises(UserError, match='model.safetensors: missing, damaged'):
        load_released(folder)
    os.remove(path)
    with pytest.raises(UserError, match='no weights'):
        load_released(folder)


def test_pytorch_model_bin(tmp_path, tokens, monkeypatch):
    folder, weights = write_folder(tmp_path, LATENT)
    want = load_released(folder)(tokens)[0]
    os.remove(tmp_path / 'model.safetensors')
    torch.save(weights, tmp_path / 'pytorch_model.bin')
    assert torch.equal(load_released(folder)(tokens)[0], want)

    monkeypatch.chdir(tmp_path)
    torch.save(Evil(), 'pytorch_model.bin')
    with pytest.raises(UserError, match='pytorch_model.bin: missing, damaged, or no file'):
        load_released(folder)
    assert not os.path.exists('executed')


# ---- export --------------------------------------------------------------------------------------

def test_a_config_that_lacks_a_number_is_told(tmp_path):
    save_hf(make(), str(tmp_path), 'byte')
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    del config['rms_norm_eps']
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="config.json: lacks 'rms_norm_eps'"):
        describe(str(tmp_path))


def test_only_plain_models_are_exported(tmp_path):
    folder, _ = write_folder(tmp_path / 'in', NEOX)
    for model in (load_released(folder), make(depth_attn=True), make(ponder='loop'),
                  make(embed_scale=2.0)):
        with pytest.raises(UserError, match='only plain models'):
            save_hf(model, str(tmp_path / 'out'), 'byte')
    assert not (tmp_path / 'out').exists()


def test_the_export_knows_the_parts_of_model_py_that_it_was_written_for(
        tmp_path, monkeypatch, capsys):
    """
    After a change of one: do others compute it so? Then put its sum into WRITTEN of tools/hf.py.
    """
    source = hf.source_of_model()
    assert hf.sums_of(source, tuple(hf.WRITTEN)) == hf.WRITTEN
    save_hf(make(), str(tmp_path), 'byte')
    assert capsys.readouterr().err == ''
    edited = source.replace('logits = self.lm_head(h)', 'logits = 2 * self.lm_head(h)')
    monkeypatch.setattr(hf, 'source_of_model', lambda: edited)
    save_hf(make(), str(tmp_path), 'byte')
    assert 'warning: GPT.head of model.py was changed' in capsys.readouterr().err


def test_an_export_without_the_tokenizers_vocabulary_says_what_it_lacks(
        tmp_path, monkeypatch, capsys):
    def offline(name):
        raise UserError('no network')
    monkeypatch.setattr(hf, 'get_tokenizer', offline)
    hf.save_hf(make(), str(tmp_path), 'gpt2')
    assert 'config.json has no eos_token_id' in capsys.readouterr().err


def test_an_exported_model_is_trained_on_and_asked(small_data, tmp_path, capsys):
    """Of bytes there is no tokenizer's file: the folder says that they are bytes."""
    folder = save(tmp_path / 'plain', make(vocab_size=320, n_tokens=257))
    exported = str(tmp_path / 'exported')
    hf.main([folder, exported])
    with pytest.raises(UserError, match='exported holds a model'):      # perhaps one downloaded
        hf.main([folder, exported])
    with open(os.path.join(exported, 'config.json')) as f:
        assert json.load(f)['eos_token_id'] == 256, "others stop where a text ends"
    train.main([f'--init_from=hf:{exported}', f'--data_dir={small_data}', '--max_steps=1',
                f'--out_dir={tmp_path / "on"}', '--batch_tokens=24', '--micro_batch=1',
                '--eval_tokens=24', '--sample_tokens=0', '--device=cpu', '--dtype=float32'])
    assert load_checkpoint(str(tmp_path / 'on'))['tokenizer'] == 'byte'
    capsys.readouterr()
    for of in folder, f'hf:{exported}':
        sample.main([of, '--start=def', '--max_new_tokens=9', '--temperature=0'])
    first, second = capsys.readouterr().out.split('def')[1:]
    assert first == second

    write_json(tmp_path / 'exported' / 'tokenizer.json', TOKENIZER)     # whoever adds one means it
    assert load_checkpoint(f'hf:{exported}')['tokenizer'] == f'hf:{exported}'


# ---- tokenizers ----------------------------------------------------------------------------------

HARD = [
    'hello  he hello    hell\n',
    ' ' * 37 + 'x' + '\t' * 3 + ' \r\n\r\n  \n ',
    '日本語のテキスト 👩‍👩‍👧‍👦🙂 émoji مرحبا \u00a0\u2003',
    '\x00\x01\x7f\x85 \ufffd \ufeff',
    'a <|endoftext|> b <|padding|>',
    '',
]


def test_tokens_and_texts(ouro_folder, tmp_path):
    tokenizer = get_tokenizer(ouro_folder)
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text
    assert encode(tokenizer, b'hello').tolist() == [260, 0]
    assert sample.encode_prompt('hello\udce9', tokenizer, 9) == (      # no UTF-8, from a shell
        tokenizer.encode_ordinary('hello\ufffd'))
    assert encode(tokenizer, b'    ').tolist() == [262, 0]
    assert 0 not in tokenizer.encode_ordinary('<|endoftext|>')      # in a text, it is text
    first, *_ = tokenizer.encode_ordinary('🙂')                     # part of a character
    assert tokenizer.decode_single_token_bytes(first) == '🙂'.encode()[:1]
    assert tokenizer.decode([257, 269, 999, 258]) == 'hell'         # rows that are no tokens
    assert tokenizer.n_vocab == 264

    write_json(tmp_path / 'tokenizer.json', TOKENIZER)
    for eos, want in ([263, 1], 263), (None, 0):
        write_json(tmp_path / 'config.json', dict(LLAMA, eos_token_id=eos))
        assert FolderTokenizer(str(tmp_path)).eot_token == want


def test_other_tokenizers(tmp_path):
    folder, _ = write_folder(tmp_path, LLAMA)
    with pytest.raises(UserError, match='no tokenizer.json'):
        FolderTokenizer(folder)
    write_json(tmp_path / 'tokenizer.json', dict(TOKENIZER, decoder=dict(type='Fuse')))
    with pytest.raises(UserError, match='only byte-level BPE'):
        FolderTokenizer(folder)
    (tmp_path / 'tokenizer.json').write_text(json.dumps(TOKENIZER)[:-10])
    with pytest.raises(UserError, match='tokenizer.json: not readable'):
        FolderTokenizer(folder)
    without_end = json.dumps(TOKENIZER).replace('<|endoftext|>', '<|end|>')
    (tmp_path / 'tokenizer.json').write_text(without_end)
    write_json(tmp_path / 'config.json', dict(LLAMA, eos_token_id=None))
    with pytest.raises(UserError, match='config.json: no eos_token_id'):
        FolderTokenizer(folder)
