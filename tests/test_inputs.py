"""The model as a library: what means nothing is a ValueError, not a number that looks right."""

import math

import numpy as np
import pytest
import torch
from conftest import make

from engine.inputs import check_batch
from model import GPT, GPTConfig

NAN, INF = math.nan, math.inf


@pytest.fixture(scope='module')
def model():
    return make(n_layer=1)      # block_size 24, n_tokens 50 of vocab_size 64


def whole(*shape, high=50):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


TOKENS = {
    'one row': whole(5), 'three axes': whole(1, 5, 2), 'too long': whole(1, 25),
    'no tokens': whole(2, 0), 'no rows': whole(0, 3), 'float': whole(2, 5).float(),
    'bool': whole(2, 5).bool(), 'uint8': whole(2, 5).byte(), 'int16': whole(2, 5).short(),
    'negative': whole(2, 5) - 50, 'one too large': torch.tensor([[3, 50]]),
    'padding row': torch.tensor([[63, 1]]), 'outside': torch.tensor([[64, 1]]),
    'list': [[1, 2]], 'array': np.ones((1, 2), np.int64), 'none': None,
}


@pytest.mark.parametrize('name', TOKENS)
def test_tokens(model, name):
    with pytest.raises(ValueError):
        model(TOKENS[name])


TARGETS = {
    'shorter': whole(2, 4), 'longer': whole(2, 6), 'flat': whole(10), 'other rows': whole(1, 5),
    'transposed': whole(5, 2), 'one more axis': whole(2, 5, 1), 'float': whole(2, 5).float(),
    'int32': whole(2, 5).int(), 'too large': whole(2, 5) + 50, 'list': [[1] * 5] * 2,
    'probabilities': torch.rand(2, 5, 50),
}


@pytest.mark.parametrize('name', TARGETS)
@pytest.mark.parametrize('training', [True, False])
def test_targets(model, name, training):
    with pytest.raises(ValueError, match='targets'):
        model.train(training)(whole(2, 5), TARGETS[name])
    model.eval()


def test_what_is_right_is_taken(model):
    idx, targets = whole(2, 24), whole(2, 24)
    targets[0, :5] = -1
    _, loss = model(idx, targets)
    assert torch.equal(loss, model(idx.int(), targets)[1])
    assert loss.isfinite()


@pytest.mark.parametrize('jacobi', [-1, 1.0, True, 'x', NAN])
def test_jacobi(model, jacobi):
    with pytest.raises(ValueError, match='jacobi'):
        model(whole(2, 5), None, jacobi)


# ---- generation ----------------------------------------------------------------------------------

PROMPTS = {
    'floats': [[1.5, 2.0]], 'whole floats': [[1.0, 2.0]], 'float tensor': torch.ones(1, 3),
    'bools': [[True, False]], 'text': ['abc'], 'one text': 'abc', 'nested': [[[1, 2]]],
    'mixed': [[1, 'a']], 'None in it': [[1, None]], 'none': [], 'empty': [[]],
    'one empty': [[1], []],
    'negative': [[-1]], 'padding row': [[50]], 'outside': [[64]], 'huge': [[10 ** 30]],
    'too long': [[1] * 25], 'numbers': [1, 2], 'three axes': whole(1, 2, 2),
    'complex': torch.ones(1, 2, dtype=torch.complex64), 'nan': [[NAN]],
}


@pytest.mark.parametrize('name', PROMPTS)
def test_prompts(model, name):
    for function in (model.generate, model.stream):
        with pytest.raises(ValueError):
            function(PROMPTS[name], 3)


def test_prompts_of_any_whole_numbers(model):
    right = model.generate([[1, 2, 3]], 4, seed=1)[0]
    for prompt in ((1, 2, 3), np.array([1, 2, 3], np.uint16), torch.tensor([1, 2, 3]).byte(),
                   range(1, 4)):
        assert torch.equal(model.generate([prompt], 4, seed=1)[0], right)


OPTIONS = [
    *[('temperature', value) for value in (-1, -0.5, NAN, INF, -INF, 'x', None, [1], True)],
    *[('top_p', value) for value in (0, 0.0, -0.1, 1.1, NAN, INF, 'x', True)],
    *[('top_k', value) for value in (0, -1, 1.5, NAN, 'x', True, 2.0)],
    *[('seed', value) for value in (-1, 1.5, 'x', 2 ** 64, True, NAN)],
    *[('stop_token', value) for value in (-1, 1.5, 'x', True)],
    *[('max_new_tokens', value) for value in (-1, 1.5, 'x', None, NAN, True)],
]


@pytest.mark.parametrize('name, value', OPTIONS)
def test_options(model, name, value):
    options = {'max_new_tokens': 3, name: value}
    for function in (model.generate, model.stream):
        with pytest.raises(ValueError, match=name):
            function([[1, 2]], **options)


def test_the_ends_of_what_is_allowed(model):
    right = model.generate([[1, 2]], 5, temperature=0)[0]
    for options in (dict(top_k=1), dict(top_p=1e-9), dict(temperature=1e-6),
                    dict(top_k=1, top_p=1)):
        assert torch.equal(model.generate([[1, 2]], 5, seed=0, **options)[0], right)
    assert model.generate([[1, 2]], 0)[0].tolist() == [1, 2]


# ---- settings ------------------------------------------------------------------------------------

WHOLE = ['vocab_size', 'n_tokens', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd',
         'head_dim', 'mlp_hidden', 'depth_stride', 'ponder_steps', 'ponder_topk', 'jacobi_iters']
NUMBERS = ['rope_theta', 'norm_eps', 'embed_scale', 'init_std', 'dropout', 'halt_tau',
           'halt_lambda', 'halt_start', 'halt_full', 'halt_share', 'halt_beta']
SWITCHES = ['qk_norm', 'tie_embeddings', 'depth_attn']
WORDS = ['depth_mode', 'ponder', 'halting']


@pytest.mark.parametrize('name, value', [
    *[(name, value) for name in WHOLE for value in (2.0, 2.5, NAN, '2', True, [2], 10 ** 600)],
    *[(name, value) for name in NUMBERS for value in (NAN, INF, -INF, '1', True, 1j, 10 ** 600)],
    *[(name, value) for name in SWITCHES for value in (1, 0, 'True', None, 1.0)],
    *[(name, value) for name in WORDS for value in (None, 1, True, b'none')],
    ('n_layer', 10 ** 6), ('ponder_steps', 10 ** 6), ('vocab_size', 2 ** 40), ('n_embd', 2 ** 40),
    ('mlp_hidden', 2 ** 40), ('head_dim', 2 ** 40), ('n_head', 2 ** 40),
])
def test_settings_of_another_type(name, value):
    with pytest.raises(ValueError, match=f'^{name}') as error:
        GPTConfig(**{name: value})
    assert '\n' not in str(error.value)


def test_a_whole_number_is_a_number_too():
    config = GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=64, rope_theta=10000, dropout=0)
    assert config.rope_theta == 10000
    GPT(config)


def test_looking_costs_a_step_next_to_nothing(model, monkeypatch):
    """A GPU, here a tensor without numbers, is not asked for them."""
    asked = []
    monkeypatch.setattr(torch.Tensor, 'aminmax', lambda self: asked.append(self.device.type))
    config = GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=64, block_size=8)
    idx = torch.zeros(1, 8, dtype=torch.int64, device='meta')
    check_batch(idx, idx, None, config)
    assert asked == []
