"""
Checkpoints that are not what was saved: whatever is in them, it is refused in one line that names
the field, or makes no difference.
"""

import copy
import math
import random
import zipfile

import pytest
import torch
from conftest import make, save
from test_train import QUICK, SHAPE

import engine.state
import train
from engine.checkpoint import load_checkpoint, load_weights, save_checkpoint
from engine.files import UserError
from model import GPT, GPTConfig
from sample import load_model

WEIGHT = 'h.1.attn.c_attn.weight'       # (192, 32) with SHAPE
NAN, INF = math.nan, math.inf


@pytest.fixture(scope='module')
def trained(small_data, tmp_path_factory):
    """The checkpoint of a short run, in memory of its own."""
    folder = tmp_path_factory.mktemp('trained')
    train.main([*SHAPE, *QUICK, '--max_steps=4', '--ponder=pause', '--ponder_steps=1',
                f'--data_dir={small_data}', f'--out_dir={folder}'])
    return copy.deepcopy(load_checkpoint(str(folder), GPTConfig))


def refused(folder, state):
    """Why this checkpoint is refused: one line."""
    torch.save(state, folder / 'ckpt.pt')
    with pytest.raises(UserError, match='not a checkpoint') as error:
        load_checkpoint(str(folder), GPTConfig)
    message = str(error.value)
    assert '\n' not in message
    reason = message.partition('(')[2]
    for internal in ('object', 'NoneType', 'Traceback', '__', 'torch.Size', 'digits'):
        assert internal not in reason
    return message


def test_what_was_saved_is_accepted_bit_for_bit(trained, tmp_path):
    torch.save(trained, tmp_path / 'ckpt.pt')
    loaded = load_checkpoint(str(tmp_path), GPTConfig)
    assert loaded.keys() == trained.keys()
    for name, tensor in trained['model'].items():
        assert torch.equal(tensor, loaded['model'][name])


# ---- fields --------------------------------------------------------------------------------------

FIELDS = ('version', 'step', 'config', 'settings', 'tokenizer', 'model', 'optimizer')


@pytest.mark.parametrize('value', [None, [], 1.5, True, torch.zeros(2)])
@pytest.mark.parametrize('field', FIELDS)
def test_fields_of_another_kind(trained, tmp_path, field, value):
    assert field in refused(tmp_path, {**trained, field: value})


@pytest.mark.parametrize('field', FIELDS)
def test_fields_that_are_missing(trained, tmp_path, field):
    state = {key: value for key, value in trained.items() if key != field}
    assert f'{field} is missing' in refused(tmp_path, state)


def test_what_pytorch_does_not_load_is_refused_without_its_advice(tmp_path):
    for content in (10 ** 5000, {'step': random.Random(0)}, UserError):
        assert 'holds more than tensors' in refused(tmp_path, content)


@pytest.mark.parametrize('content', [None, [], 'text', 3, {}, torch.zeros(3), {3: 4}, (1, 2)])
def test_content_that_is_no_checkpoint(tmp_path, content):
    refused(tmp_path, content)


@pytest.mark.parametrize('step', ['7', '', -1, 4.0, 2 ** 31, 10 ** 600, NAN, False, {}])
def test_steps_that_are_none(trained, tmp_path, step):
    assert 'step' in refused(tmp_path, {**trained, 'step': step})


@pytest.mark.parametrize('name, value', [
    ('learning_rate', [1]), ('seed', {}), (3, 4), ('out_dir', b'out'), ('warmup', torch.ones(1)),
])
def test_settings_of_another_kind(trained, tmp_path, name, value):
    settings = {**trained['settings'], name: value}
    assert 'settings' in refused(tmp_path, {**trained, 'settings': settings})


@pytest.mark.parametrize('name, value', [
    ('learning_rate', 'x'), ('learning_rate', NAN), ('seed', 1.5), ('max_steps', None),
    ('batch_tokens', True), ('out_dir', 3), ('eval_only', 0), ('weight_decay', INF),
    ('micro_batch', 10 ** 30),
])
def test_settings_that_would_change_a_resumed_run(trained, tmp_path, name, value):
    state = {**trained, 'settings': {**trained['settings'], name: value}}
    torch.save(state, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match=name):
        train.main(['--init_from=resume', f'--out_dir={tmp_path}', '--device=cpu'])


def test_settings_that_are_missing_are_named(trained, tmp_path, capsys):
    settings = {**trained['settings']}
    del settings['learning_rate'], settings['beta1']
    torch.save({**trained, 'settings': settings}, tmp_path / 'ckpt.pt')
    train.main(['--init_from=resume', f'--out_dir={tmp_path}', '--max_steps=5'])
    assert 'at their defaults unless set: beta1, learning_rate' in capsys.readouterr().err


# ---- the config ----------------------------------------------------------------------------------

@pytest.mark.parametrize('name, value', [
    ('n_layer', 2.0), ('n_layer', 2), ('n_layer', 4), ('n_layer', '3'), ('n_layer', 10 ** 9),
    ('n_layer', 0), ('n_layer', -3), ('n_layer', True), ('n_layer', None),
    ('vocab_size', 10 ** 12), ('vocab_size', 64), ('vocab_size', 10 ** 600),
    ('n_tokens', None), ('n_tokens', 321), ('n_embd', 33), ('n_embd', 64), ('n_head', 3),
    ('n_kv_head', 1), ('n_kv_head', None), ('head_dim', 8), ('mlp_hidden', 49),
    ('mlp_hidden', None), ('block_size', 0), ('block_size', 'long'), ('rope_theta', NAN),
    ('rope_theta', INF), ('rope_theta', '1e4'), ('norm_eps', -1.0), ('norm_eps', [1e-5]),
    ('qk_norm', False), ('qk_norm', 1), ('tie_embeddings', None), ('embed_scale', None),
    ('embed_scale', 0.0), ('embed_scale', NAN), ('init_std', None), ('dropout', 1.5),
    ('dropout', NAN), ('depth_attn', 'yes'), ('depth_stride', 0), ('depth_mode', 'hard'),
    ('depth_mode', None), ('ponder', 'telepathy'), ('ponder', None), ('ponder_steps', 10 ** 9),
    ('ponder_steps', 1.0), ('jacobi_iters', -1), ('jacobi_iters', None),
    ('halting', 'gate'), ('halting', 1), ('halt_tau', '0'), ('halt_start', '0.9'),
    ('halt_beta', -INF), ('telepathy', True), (7, 7),
])
def test_configs_that_were_never_saved(trained, tmp_path, name, value):
    state = {**trained, 'config': {**trained['config'], name: value}}
    message = refused(tmp_path, state)
    named = str(name) in message
    shape = 'has the shape' in message or 'is missing' in message or 'no such weight' in message
    assert named or shape


@pytest.mark.parametrize('name', ['n_layer', 'rope_theta', 'embed_scale', 'halt_tau', 'ponder'])
def test_configs_with_a_gap(trained, tmp_path, name):
    config = {key: value for key, value in trained['config'].items() if key != name}
    assert f'config.{name} is missing' in refused(tmp_path, {**trained, 'config': config})


# ---- weights -------------------------------------------------------------------------------------

def with_value(tensor, value, at=-1):
    changed = tensor.clone()
    changed.view(-1)[at] = value
    return changed


WEIGHTS = {
    'None': lambda w: None,
    'list': lambda w: w.tolist(),
    'number': lambda w: 1.0,
    'transposed': lambda w: w.t().contiguous(),
    'not in order': lambda w: w.t().contiguous().t(),
    'shorter': lambda w: w[:-1].clone(),
    'longer': lambda w: torch.cat((w, w[:1])),
    'flat': lambda w: w.flatten(),
    'empty': lambda w: w[:0].clone(),
    'one more axis': lambda w: w[None].clone(),
    'expanded': lambda w: w[:1].clone().expand_as(w),
    'int': lambda w: w.int(),
    'bool': lambda w: w.bool(),
    'complex': lambda w: w.to(torch.complex64),
    'float8': lambda w: w.to(torch.float8_e4m3fn),
    'sparse': lambda w: w.to_sparse(),
    'meta': lambda w: w.to('meta'),
    'nan first': lambda w: with_value(w, NAN, 0),
    'nan last': lambda w: with_value(w, NAN),
    'inf': lambda w: with_value(w, INF, 5),
    '-inf': lambda w: with_value(w, -INF, 7),
}


@pytest.mark.parametrize('change', WEIGHTS)
def test_weights_that_are_none(trained, tmp_path, change):
    weights = {**trained['model'], WEIGHT: WEIGHTS[change](trained['model'][WEIGHT])}
    assert WEIGHT in refused(tmp_path, {**trained, 'model': weights})


@pytest.mark.parametrize('name', ['wte.weight', 'ln_f.weight', WEIGHT, 'mechanism.pause'])
def test_names_that_are_missing_or_too_many(trained, tmp_path, name):
    fewer = {key: tensor for key, tensor in trained['model'].items() if key != name}
    assert f'model.{name} is missing' in refused(tmp_path, {**trained, 'model': fewer})
    more = {**trained['model'], name + '2': trained['model'][name]}
    assert f'model.{name}2' in refused(tmp_path, {**trained, 'model': more})


def test_weights_in_other_float_types_are_read(trained, tmp_path):
    half = {name: tensor.bfloat16() for name, tensor in trained['model'].items()}
    torch.save({**trained, 'model': half}, tmp_path / 'ckpt.pt')
    model, *_ = load_model(str(tmp_path), 'cpu')
    assert model.wte.weight.dtype == torch.float32
    assert torch.equal(model.ln_f.weight.bfloat16(), half['ln_f.weight'])


# ---- the optimizer -------------------------------------------------------------------------------

def matrix_of(state):
    """The number of a weight matrix in the optimizer."""
    return state['optimizer']['param_groups'][0]['params'][1]


MOMENTS = {
    **{f'exp_avg {name}': ('exp_avg', change) for name, change in WEIGHTS.items()},
    **{f'exp_avg_sq {name}': ('exp_avg_sq', change) for name, change in WEIGHTS.items()},
    'negative squares': ('exp_avg_sq', lambda v: with_value(v, -1e-3)),
    'step None': ('step', lambda n: None),
    'step text': ('step', lambda n: '4'),
    'step int': ('step', lambda n: 4),
    'step negative': ('step', lambda n: n - 5),
    'step too large': ('step', lambda n: n + 1),
    'step nan': ('step', lambda n: n * NAN),
    'step fraction': ('step', lambda n: n - 0.5),
    'step long': ('step', lambda n: n.expand(3).clone()),
}


@pytest.mark.parametrize('change', MOMENTS)
def test_moments_that_are_none(trained, tmp_path, change):
    state = copy.deepcopy(trained)
    key, function = MOMENTS[change]
    held = state['optimizer']['state'][matrix_of(state)]
    held[key] = function(held[key])
    message = refused(tmp_path, state)
    assert 'optimizer' in message and key in message


def test_moments_of_another_optimizer(trained, monkeypatch):
    """As docs/modify.md puts SGD in the place of AdamW: MOMENTS names what it holds."""
    model = make()
    named = list(model.named_parameters())
    matrices = [p for _, p in named if p.dim() >= 2]
    vectors = [p for _, p in named if p.dim() < 2]
    sgd = torch.optim.SGD([dict(params=matrices), dict(params=vectors)], lr=0.1, momentum=0.9)
    model(torch.zeros(1, 3, dtype=torch.long))[0][..., :2].sum().backward()
    sgd.step()
    held = {**copy.deepcopy(trained), 'optimizer': sgd.state_dict()}
    with pytest.raises(ValueError, match='holds momentum_buffer, not step, exp_avg, exp_avg_sq'):
        engine.state.check_optimizer(held['optimizer'])
    monkeypatch.setattr(engine.state, 'MOMENTS', ('momentum_buffer',))
    engine.state.check_optimizer(held['optimizer'])
    engine.state.check_moments(held, named)
    held['optimizer']['state'][0]['momentum_buffer'] = torch.zeros(3)
    with pytest.raises(ValueError, match='momentum_buffer has the shape'):
        engine.state.check_moments(held, named)


def forget_all(optimizer):
    optimizer['state'] = {}


def forget_one(optimizer):
    optimizer['state'].popitem()


def forget_a_moment(optimizer):
    del optimizer['state'][0]['exp_avg_sq']


def swap_moments(optimizer):
    for held in optimizer['state'].values():
        held['exp_avg'], held['exp_avg_sq'] = held['exp_avg_sq'], held['exp_avg']


def swap_parameters(optimizer):
    a, b = optimizer['param_groups'][0]['params'][1:3]
    optimizer['state'][a], optimizer['state'][b] = optimizer['state'][b], optimizer['state'][a]


def one_group(optimizer):
    optimizer['param_groups'].pop()


def three_groups(optimizer):
    optimizer['param_groups'].append({'params': []})


def groups_exchanged(optimizer):
    optimizer['param_groups'].reverse()


def a_shorter_group(optimizer):
    number = optimizer['param_groups'][0]['params'].pop()
    del optimizer['state'][number]


def a_parameter_twice(optimizer):
    params = optimizer['param_groups'][0]['params']
    params[1] = params[0]


def a_stranger(optimizer):
    optimizer['state'][99] = optimizer['state'][0]


def text_for_a_parameter(optimizer):
    optimizer['param_groups'][0]['params'][0] = 'wte'


def a_group_of_text(optimizer):
    optimizer['param_groups'][0] = 'matrices'


def groups_without_parameters(optimizer):
    for group in optimizer['param_groups']:
        del group['params']


def groups_in_a_dictionary(optimizer):
    optimizer['param_groups'] = dict(enumerate(optimizer['param_groups']))


def state_in_a_list(optimizer):
    optimizer['state'] = list(optimizer['state'].values())


def no_groups(optimizer):
    del optimizer['param_groups']


def no_state(optimizer):
    del optimizer['state']


@pytest.mark.parametrize('change', [
    forget_all, forget_one, forget_a_moment, swap_moments, swap_parameters, one_group,
    three_groups, groups_exchanged, a_shorter_group, a_parameter_twice, a_stranger,
    text_for_a_parameter, a_group_of_text, groups_without_parameters, groups_in_a_dictionary,
    state_in_a_list, no_groups, no_state,
])
def test_optimizers_that_do_not_fit(trained, tmp_path, change):
    state = copy.deepcopy(trained)
    change(state['optimizer'])
    assert 'optimizer' in refused(tmp_path, state)


def test_weights_alone_are_sampled_from_and_not_resumed(trained, tmp_path):
    torch.save({**trained, 'optimizer': {}}, tmp_path / 'ckpt.pt')
    load_model(str(tmp_path), 'cpu')
    with pytest.raises(UserError, match='no optimizer state'):
        train.main(['--init_from=resume', f'--out_dir={tmp_path}', '--max_steps=5'])


@pytest.mark.parametrize('scaler', [
    [], 'x', {'scale': 1.0}, {'scale': None}, dict.fromkeys(('scale', 'growth_factor')),
    dict(scale=NAN, growth_factor=2.0, backoff_factor=0.5, growth_interval=9, _growth_tracker=0),
    dict(scale=-1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=9, _growth_tracker=0),
    dict(scale='1', growth_factor=2.0, backoff_factor=0.5, growth_interval=9, _growth_tracker=0),
])
def test_a_scaler_that_is_none(trained, tmp_path, scaler):
    if not scaler:
        scaler = [1]
    assert 'scaler' in refused(tmp_path, {**trained, 'scaler': scaler})


def test_fp16_may_have_skipped_all_steps_so_far(trained, tmp_path):
    skipped = copy.deepcopy(trained)
    skipped['optimizer']['state'] = {}
    skipped['scaler'] = dict(scale=4096.0, growth_factor=2.0, backoff_factor=0.5,
                             growth_interval=2000, _growth_tracker=0)
    torch.save(skipped, tmp_path / 'ckpt.pt')
    assert load_checkpoint(str(tmp_path), GPTConfig)['step'] == 4


# ---- the file ------------------------------------------------------------------------------------

def same(a, b):
    """Whether two values of a checkpoint are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope='module')
def file(trained, tmp_path_factory):
    """The bytes of its file."""
    folder = tmp_path_factory.mktemp('file')
    save_checkpoint(str(folder), trained)
    return (folder / 'ckpt.pt').read_bytes()


def test_flipped_bits_are_noticed_or_make_no_difference(trained, file, tmp_path):
    rng = random.Random(0)
    noticed = 0
    for _ in range(60):
        changed = bytearray(file)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        (tmp_path / 'ckpt.pt').write_bytes(changed)
        try:
            state = load_checkpoint(str(tmp_path))
        except UserError as error:
            assert '\n' not in str(error)
            noticed += 1
        else:
            assert same(trained, state)     # padding between the parts
    assert noticed > 40


@pytest.mark.parametrize('share', [0, 0.001, 0.3, 0.5, 0.9, 0.9999])
def test_files_that_end_too_early(file, tmp_path, share):
    (tmp_path / 'ckpt.pt').write_bytes(file[:int(len(file) * share)])
    with pytest.raises(UserError, match='damaged'):
        load_checkpoint(str(tmp_path))


@pytest.mark.parametrize('how', ['compressed', 'twice', 'left out'])
def test_archives_that_torch_did_not_write(file, tmp_path, how):
    (tmp_path / 'right.pt').write_bytes(file)
    method = zipfile.ZIP_DEFLATED if how == 'compressed' else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / 'right.pt') as right, \
            zipfile.ZipFile(tmp_path / 'ckpt.pt', 'w', method) as wrong:
        names = right.namelist()
        if how == 'left out':
            names = [name for name in names if not name.endswith('data/3')]
        for name in names:
            wrong.writestr(name, right.read(name))
        if how == 'twice':
            with pytest.warns(UserWarning, match='Duplicate'):
                wrong.writestr(names[0], right.read(names[0]))
    with pytest.raises(UserError, match='damaged'):
        load_checkpoint(str(tmp_path))


def test_a_damaged_checkpoint_is_not_kept_in_the_place_of_a_good_one(trained, file, tmp_path):
    """Neither one with flipped bits nor one with NaN takes the place of ckpt_prev.pt."""
    (tmp_path / 'ckpt_prev.pt').write_bytes(file)
    middle = len(file) // 2
    flipped = file[:middle] + bytes([file[middle] ^ 255]) + file[middle + 1:]
    (tmp_path / 'ckpt.pt').write_bytes(flipped)
    save_checkpoint(str(tmp_path), {**trained, 'step': 5})
    assert (tmp_path / 'ckpt_prev.pt').read_bytes() == file


@pytest.mark.parametrize('damage', ['nan', 'shape', 'missing'])
def test_the_one_before_is_used(trained, file, tmp_path, capsys, damage):
    (tmp_path / 'ckpt_prev.pt').write_bytes(file)
    weights = dict(trained['model'])
    if damage == 'missing':
        del weights[WEIGHT]
    else:
        weights[WEIGHT] = WEIGHTS['nan last' if damage == 'nan' else 'shorter'](weights[WEIGHT])
    torch.save({**trained, 'model': weights}, tmp_path / 'ckpt.pt')
    assert same(load_checkpoint(str(tmp_path), GPTConfig), trained)
    told = capsys.readouterr().err
    assert WEIGHT in told and told.count('\n') == 1


def test_a_resumed_run_after_any_change_is_refused_before_it_computes(trained, tmp_path,
                                                                      monkeypatch):
    """The change that used to reach AdamW's fused kernel, by way of the program."""
    state = copy.deepcopy(trained)
    held = state['optimizer']['state'][matrix_of(state)]
    held['exp_avg'] = held['exp_avg'][:2].clone()
    torch.save(state, tmp_path / 'ckpt.pt')
    monkeypatch.setattr(torch.optim.AdamW, 'step', None)
    with pytest.raises(UserError, match='exp_avg has the shape'):
        train.main(['--init_from=resume', f'--out_dir={tmp_path}', '--max_steps=5'])


def test_models_of_every_toggle_pass(toggle, tmp_path):
    folder = save(tmp_path, make(**toggle))
    state = load_checkpoint(folder, GPTConfig)
    load_weights(GPT(GPTConfig(**state['config'])), state)


def test_another_model_than_the_weights(trained):
    model = GPT(GPTConfig(**{**trained['config'], 'n_layer': 2}))
    with pytest.raises(UserError, match='do not fit'):
        load_weights(model, trained)


