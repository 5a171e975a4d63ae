"""
Hugging Face folders: read, written, refused. Their own model code is compared where transformers is
installed.
"""
import json
import sys

import pytest
import torch
from conftest import make

import train
from engine.checkpoint import load_checkpoint
from engine.files import UserError
from engine.hf_config import describe
from engine.huggingface import load_state, read_description
from model import GPTConfig

pytest.importorskip('safetensors')
import safetensors.torch

from tools.hf import load_released, rename_from_hf, rename_to_hf, save_hf

PLAIN = [
    dict(),
    dict(n_kv_head=2, tie_embeddings=True),
    dict(qk_norm=False, n_kv_head=1),
    dict(head_dim=16),
    dict(rope_theta=1e6, norm_eps=1e-3),
]
QWEN = dict(
    model_type='qwen3',
    vocab_size=50,
    max_position_embeddings=24,
    num_hidden_layers=5,
    num_attention_heads=4,
    hidden_size=32,
    intermediate_size=48,
    rms_norm_eps=1e-6,
)


# ---- there and back ------------------------------------------------------------------------------

@pytest.mark.parametrize('settings', PLAIN)
def test_round_trip(settings, tmp_path, idx):
    model = make(**settings).float()
    save_hf(model, str(tmp_path))
    back = load_released(str(tmp_path)).eval()
    assert back.config.vocab_size == 50
    assert torch.equal(back(idx)[0], model(idx)[0][..., :50])


@pytest.mark.parametrize('settings', PLAIN)
def test_names_are_inverse(settings):
    model = make(**settings)
    state = model.state_dict()
    back = rename_from_hf(rename_to_hf(state, model.config), model.config)
    assert back.keys() == state.keys()
    for name in state:
        assert torch.equal(back[name], state[name])


def test_parameters_of_mechanisms_go_to_the_mechanism():
    model = make()
    theirs = rename_to_hf(model.state_dict(), model.config)
    theirs['router.weight'] = torch.ones(1, 32)
    ours = rename_from_hf(theirs, model.config)
    assert torch.equal(ours['mechanism.router.weight'], torch.ones(1, 32))


@pytest.mark.parametrize('settings', PLAIN)
def test_equals_transformers(settings, tmp_path, idx):
    transformers = pytest.importorskip('transformers')
    model = make(**settings).float()
    save_hf(model, str(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), attn_implementation='eager').eval()
    with torch.no_grad():
        want = theirs(input_ids=idx).logits
        assert torch.allclose(want, model(idx)[0][..., :50], atol=2e-4)


# ---- what is refused -----------------------------------------------------------------------------

def test_mechanisms_are_not_exported(tmp_path):
    folder = tmp_path / 'x'
    for settings in (
        dict(depth_attn=True),
        dict(embed_scale=2.0),
        dict(ponder='loop', embed_scale=1.0),
    ):
        with pytest.raises(UserError, match=next(iter(settings))):
            save_hf(make(**settings), str(folder))
    assert not folder.exists()


@pytest.mark.parametrize('change, words', [
    (dict(model_type='gpt2'), "'gpt2'"),
    (dict(attention_bias=True), 'attention_bias'),
    (dict(hidden_act='gelu'), 'gelu'),
    (dict(rope_scaling=dict(rope_type='yarn')), 'yarn'),
    (dict(rope_scaling=dict(type='linear', factor=4.0)), 'linear'),
    (dict(rope_parameters=dict(rope_type='llama3', rope_theta=5e5)), 'llama3'),
    (dict(use_sliding_window=True), 'use_sliding_window'),
    (dict(hidden_size=None), 'not a usable'),
    (dict(num_hidden_layers=5.5), 'not a usable.*num_hidden_layers=5.5'),
    (dict(num_key_value_heads='2'), "not a usable.*num_key_value_heads='2'"),
    (dict(rms_norm_eps=None), 'not a usable.*rms_norm_eps=None'),
    (dict(rms_norm_eps='1e-5'), "not a usable.*rms_norm_eps='1e-5'"),
])
def test_foreign_configurations(change, words):
    with pytest.raises(UserError, match=f'^config.json: .*{words}'):
        describe({**QWEN, **change}, 'config.json')


def test_missing_fields_are_named():
    for name in QWEN.keys() - {'model_type'}:
        config = dict(QWEN)
        del config[name]
        with pytest.raises(UserError, match=f"^config.json: not a usable.*'{name}'"):
            describe(config, 'config.json')


def test_configuration_fields():
    c = describe({
        **QWEN,
        'rope_parameters': dict(rope_type='default', rope_theta=1e6),
        'num_key_value_heads': 2,
        'head_dim': 16,
        'tie_word_embeddings': True,
    }, '').config
    assert c['rope_theta'] == 1e6
    assert c['n_kv_head'] == 2
    assert c['head_dim'] == 16
    assert c['tie_embeddings'] is True
    assert c['qk_norm'] is True
    assert c['norm_eps'] == 1e-6
    assert c['block_size'] == 24

    llama = {**QWEN, 'model_type': 'llama'}
    assert describe({**llama, 'rope_theta': 5e5}, '').config['rope_theta'] == 5e5
    assert not describe(llama, '').config['qk_norm']


def test_a_mechanism_does_not_scale_the_embeddings_of_such_a_model():
    fields = describe(QWEN, '').config
    for ponder in ('embedding', 'loop'):
        assert GPTConfig(**fields, ponder=ponder).embed_scale == 1


def test_missing_and_damaged_folders(tmp_path):
    folder = str(tmp_path)
    path = tmp_path / 'config.json'
    for text in (None, '[]', '{', '[' * 100_000):
        if text:
            path.write_text(text)
        with pytest.raises(UserError, match='not a readable'):
            read_description(folder)
    with pytest.raises(UserError, match='not a readable'):
        load_released(str(tmp_path / 'nowhere'))

    save_hf(make().float(), folder)
    path = tmp_path / 'model.safetensors'
    weights = safetensors.torch.load_file(path)
    weights.pop('model.layers.2.mlp.up_proj.weight')
    safetensors.torch.save_file(weights, path)
    with pytest.raises(UserError, match='model.layers.2.mlp.up_proj.weight'):
        load_released(folder)

    with open(path, 'r+b') as f:
        f.truncate(100)
    with pytest.raises(UserError, match='model.safetensors: damaged'):
        load_released(folder)


def test_numbers_that_do_not_fit_together_are_refused_with_their_file(tmp_path):
    save_hf(make().float(), str(tmp_path))
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    for change in dict(head_dim=7), dict(num_key_value_heads=3), dict(hidden_size=-32):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match='config.json: not a usable.*') as error:
            load_released(str(tmp_path))
        assert '\n' not in str(error.value)


def test_a_full_disk_keeps_the_weights_before(tmp_path, monkeypatch):
    save_hf(make().float(), str(tmp_path))

    def fails(weights, path, **_):
        with open(path, 'w') as f:
            f.write('half')
        raise safetensors.SafetensorError('No space left on device')

    monkeypatch.setattr(safetensors.torch, 'save_file', fails)
    with pytest.raises(UserError, match='cannot be written .No space'):
        save_hf(make(seed=1).float(), str(tmp_path))
    before = make().float().ln_f.weight
    assert torch.equal(load_released(str(tmp_path)).ln_f.weight, before)
    assert not (tmp_path / 'model.safetensors.tmp').exists()


def test_without_safetensors_the_message_names_the_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    with pytest.raises(UserError, match='pip install safetensors'):
        save_hf(make(), str(tmp_path))


# ---- training from one ---------------------------------------------------------------------------

def test_training_starts_from_such_a_folder(small_data, tmp_path):
    model = make(vocab_size=257, n_tokens=257).float()
    save_hf(model, str(tmp_path / 'hf'))
    common = [
        f'--init_from=hf:{tmp_path / "hf"}',
        f'--data_dir={small_data}',
        '--micro_batch=4',
        '--max_steps=1',
        '--sample_tokens=0',
        '--eval_tokens=96',
        '--dtype=float32',
        '--device=cpu',
    ]

    # a step with next to no learning rate leaves the weights as they were
    train.main([*common, f'--out_dir={tmp_path / "out"}', '--batch_tokens=96',
                '--learning_rate=1e-9', '--weight_decay=0.0'])
    after = load_checkpoint(str(tmp_path / 'out'))['model']
    for name, weight in model.state_dict().items():
        assert (after[name] - weight).abs().max() < 1e-7

    # a run may add mechanisms and read shorter texts
    train.main([*common, f'--out_dir={tmp_path / "loop"}', '--batch_tokens=32', '--block_size=8',
                '--ponder=loop', '--depth_attn=True'])
    config = load_checkpoint(str(tmp_path / 'loop'))['config']
    assert config['ponder'] == 'loop'
    assert config['embed_scale'] == 1


def test_what_is_loaded_reads_as_a_checkpoint(tmp_path):
    save_hf(make().float(), str(tmp_path))
    state = load_state(str(tmp_path))
    assert state['step'] == 0
    assert state['config'] == read_description(str(tmp_path)).config
    assert {weight.dtype for weight in state['model'].values()} == {torch.float32}
