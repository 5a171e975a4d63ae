"""Hugging Face folders: read, written, refused. Their own model code is compared where transformers is installed."""
import pytest
import torch
from conftest import make

from engine.errors import UserError

pytest.importorskip('safetensors')
import safetensors.torch

from tools.hf import config_from_hf, load_hf, read_config, rename_from_hf, rename_to_hf, save_hf

PLAIN = [dict(), dict(n_kv_head=2, tie_embeddings=True), dict(qk_norm=False, n_kv_head=1), dict(head_dim=16), dict(rope_theta=1e6, norm_eps=1e-3)]
QWEN = dict(model_type='qwen3', vocab_size=50, max_position_embeddings=24, num_hidden_layers=5, num_attention_heads=4, hidden_size=32, intermediate_size=48, rms_norm_eps=1e-6)


@pytest.mark.parametrize('settings', PLAIN)
def test_round_trip(settings, tmp_path, idx):
    model = make(**settings).float()
    save_hf(model, str(tmp_path))
    back = load_hf(str(tmp_path)).eval()
    assert back.config.vocab_size == 50 and torch.equal(back(idx)[0], model(idx)[0][..., :50])


@pytest.mark.parametrize('settings', PLAIN)
def test_names_are_inverse(settings):
    model = make(**settings)
    state = model.state_dict()
    back = rename_from_hf(rename_to_hf(state, model.config), model.config)
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in state)


def test_parameters_of_mechanisms_keep_their_names():
    model = make()
    theirs = {**rename_to_hf(model.state_dict(), model.config), 'router.weight': torch.ones(1, 32)}
    assert torch.equal(rename_from_hf(theirs, model.config)['router.weight'], torch.ones(1, 32))


@pytest.mark.parametrize('settings', PLAIN)
def test_equals_transformers(settings, tmp_path, idx):
    transformers = pytest.importorskip('transformers')
    model = make(**settings).float()
    save_hf(model, str(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), attn_implementation='eager').eval()
    with torch.no_grad(): assert torch.allclose(theirs(input_ids=idx).logits, model(idx)[0][..., :50], atol=2e-4)


def test_mechanisms_are_not_exported(tmp_path):
    for settings in (dict(depth_attn=True), dict(embed_scale=2.0), dict(ponder='loop', embed_scale=1.0)):
        with pytest.raises(UserError, match=next(iter(settings))): save_hf(make(**settings), str(tmp_path / 'x'))
    assert not (tmp_path / 'x').exists()


@pytest.mark.parametrize('change, words', [
    (dict(model_type='gpt2'), ["'gpt2'"]), (dict(attention_bias=True), ['biases']), (dict(hidden_act='gelu'), ['gelu']), (dict(rope_scaling=dict(rope_type='yarn')), ['yarn']), (dict(rope_scaling=dict(type='linear', factor=4.0)), ['linear']),
    (dict(rope_parameters=dict(rope_type='llama3', rope_theta=5e5)), ['llama3']), (dict(use_sliding_window=True), ['sliding']), (dict(hidden_size=None), ['not a usable'])])
def test_foreign_configurations(change, words):
    with pytest.raises(UserError) as error: config_from_hf({**QWEN, **change}, 'config.json')
    for word in ['config.json'] + words: assert word in str(error.value)


def test_configuration_fields():
    c = config_from_hf({**QWEN, 'rope_parameters': dict(rope_type='default', rope_theta=1e6), 'num_key_value_heads': 2, 'head_dim': 16, 'tie_word_embeddings': True}, '')
    assert (c.rope_theta, c.n_kv_head, c.head_dim, c.tie_embeddings, c.qk_norm, c.norm_eps, c.block_size) == (1e6, 2, 16, True, True, 1e-6, 24)
    assert config_from_hf({**QWEN, 'model_type': 'llama', 'rope_theta': 5e5}, '').rope_theta == 5e5 and not config_from_hf({**QWEN, 'model_type': 'llama'}, '').qk_norm


def test_missing_and_damaged_folders(tmp_path):
    for text in (None, '[]', '{'):
        if text: (tmp_path / 'config.json').write_text(text)
        with pytest.raises(UserError, match='not a readable'): read_config(str(tmp_path))
    with pytest.raises(UserError, match='not a readable'): load_hf(str(tmp_path / 'nowhere'))
    save_hf(make().float(), str(tmp_path))
    weights = safetensors.torch.load_file(tmp_path / 'model.safetensors')
    weights.pop('model.layers.2.mlp.up_proj.weight')
    safetensors.torch.save_file(weights, tmp_path / 'model.safetensors')
    with pytest.raises(UserError, match='model.layers.2.mlp.up_proj.weight'): load_hf(str(tmp_path))
    with open(tmp_path / 'model.safetensors', 'r+b') as f: f.truncate(100)
    with pytest.raises(UserError, match='not a readable'): load_hf(str(tmp_path))


def test_a_full_disk_keeps_the_weights_before(tmp_path, monkeypatch):
    save_hf(make().float(), str(tmp_path))
    def fails(weights, path, **_): open(path, 'w').write('half'); raise safetensors.SafetensorError('No space left on device')
    monkeypatch.setattr(safetensors.torch, 'save_file', fails)
    with pytest.raises(UserError, match='cannot be written .No space'): save_hf(make(seed=1).float(), str(tmp_path))
    assert torch.equal(load_hf(str(tmp_path)).ln_f.weight, make().float().ln_f.weight) and not (tmp_path / 'model.safetensors.tmp').exists()


def test_without_safetensors_the_message_names_the_install(monkeypatch, tmp_path):
    import sys
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    for call in (lambda: load_hf(str(tmp_path)), lambda: save_hf(make(), str(tmp_path))):
        with pytest.raises(UserError, match='pip install safetensors'): call()


def test_training_starts_from_such_a_folder(small_data, tmp_path):
    import train
    model = make(vocab_size=257, n_tokens=257).float()
    save_hf(model, str(tmp_path / 'hf'))
    train.main([f'--init_from=hf:{tmp_path / "hf"}', f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}', '--batch_tokens=96', '--micro_batch=4', '--max_steps=1',
                '--learning_rate=1e-9', '--weight_decay=0.0', '--sample_tokens=0', '--eval_tokens=96', '--dtype=float32', '--device=cpu'])
    after = train.load_checkpoint(str(tmp_path / 'out'))['model']
    assert all((after[k] - v).abs().max() < 1e-7 for k, v in model.state_dict().items())
    train.main([f'--init_from=hf:{tmp_path / "hf"}', f'--data_dir={small_data}', f'--out_dir={tmp_path / "loop"}', '--batch_tokens=32', '--micro_batch=4', '--max_steps=1',
                '--block_size=8', '--ponder=loop', '--depth_attn=True', '--sample_tokens=0', '--eval_tokens=96', '--dtype=float32', '--device=cpu'])
    assert train.load_checkpoint(str(tmp_path / 'loop'))['config']['ponder'] == 'loop'
