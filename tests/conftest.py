"""Shared by all tests: the toggles every promise is tested over, small models, and a way to run the programs."""
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from engine.checkpoint import CHECKPOINT_VERSION, save_checkpoint
from model import GPT, Attention, GPTConfig

torch.set_num_threads(1)  # the models here are far too small for more, and a busy machine makes threads wait for each other



def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='the long versions of some tests too')


def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: runs only with --slow')


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker('slow') and not config.getoption('--slow'): item.add_marker(pytest.mark.skip(reason='needs --slow'))


TOGGLES = {
    'plain': {},
    'plain_gqa': dict(n_kv_head=1, tie_embeddings=True),
    'depth': dict(depth_attn=True),
    'depth_gqa_stride1': dict(depth_attn=True, depth_stride=1, n_kv_head=2),
    'depth_uniform': dict(depth_attn=True, depth_mode='uniform', qk_norm=False),
    'embedding': dict(ponder='embedding', ponder_steps=2),
    'embedding_depth': dict(ponder='embedding', ponder_steps=2, depth_attn=True, n_kv_head=2),
    'embedding_topk': dict(ponder='embedding', ponder_steps=2, ponder_topk=5),
    'latent': dict(ponder='latent', ponder_steps=1),
    'latent2_depth': dict(ponder='latent', ponder_steps=2, depth_attn=True, n_kv_head=2),
    'chain': dict(ponder='chain', ponder_steps=2),
    'chain_depth': dict(ponder='chain', ponder_steps=2, depth_attn=True, n_kv_head=2),
    'loop': dict(ponder='loop', ponder_steps=2),
    'loop_depth': dict(ponder='loop', ponder_steps=2, depth_attn=True, n_kv_head=2),
    'pause': dict(ponder='pause', ponder_steps=2),
    'pause_depth': dict(ponder='pause', ponder_steps=2, depth_attn=True, n_kv_head=2),
    'gate': dict(ponder='embedding', ponder_steps=2, halting='gate', halt_tau=0.45),
    'gate_depth': dict(ponder='embedding', ponder_steps=2, halting='gate', halt_tau=0.45, depth_attn=True, n_kv_head=2),
    'mask': dict(ponder='latent', ponder_steps=1, halting='mask', halt_tau=0.4),
    'mask2_depth': dict(ponder='latent', ponder_steps=2, halting='mask', halt_tau=0.3, depth_attn=True, n_kv_head=2),
    'router': dict(ponder='chain', ponder_steps=2, halting='router', halt_tau=0.3),
    'router_depth': dict(ponder='chain', ponder_steps=2, halting='router', halt_tau=0.3, depth_attn=True, n_kv_head=2),
}
# one toggle of each mechanism, for tests that take seconds
ONE_EACH = ('plain', 'depth', 'embedding', 'latent2_depth', 'chain_depth', 'loop_depth', 'pause', 'gate', 'mask', 'router_depth')


def make(seed=0, **settings):
    """A small float64 model in eval mode with weights large enough that every part matters."""
    torch.manual_seed(seed)
    small = dict(vocab_size=64, n_tokens=50, block_size=24, n_layer=5, n_head=4, n_embd=32, mlp_hidden=48, init_std=0.2)
    if settings.get('ponder') == 'latent':
        exact = (settings.get('block_size', 24) + 1) * settings.get('ponder_steps', 3)  # enough iterations for a full context
        small.update(n_layer=3, jacobi_iters=exact)
    config = GPTConfig(**{**small, **settings})
    model = GPT(config).double().eval()
    for name, p in model.named_parameters():
        if name.startswith(('gates.', 'router.')) and p.dim() == 1: torch.nn.init.zeros_(p)  # some tokens halt, some do not
        elif p.dim() == 1: torch.nn.init.uniform_(p, 0.5, 1.5)  # norm gains that are not all 1
    return model


def close(a, b, tol=1e-10):
    """Equal up to tol where finite, and infinite at the same places."""
    assert torch.equal(a.isfinite(), b.isfinite())
    assert (a - b)[a.isfinite()].abs().max() < tol


@pytest.fixture(autouse=True)
def restore_attention():
    """tune_cpu and expect_new_lengths choose attention kernels for the whole process."""
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    Attention.sdpa = None


@pytest.fixture(params=TOGGLES)
def toggle(request):
    """Settings of one toggle; a test that takes this runs once per toggle."""
    return TOGGLES[request.param]


@pytest.fixture
def idx():
    return torch.randint(0, 50, (3, 13), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope='session')
def small_data(tmp_path_factory):
    """A data folder of byte tokens, about 60 kB of text, and the text itself."""
    from engine.shards import get_tokenizer
    from prepare_data import write_dataset
    folder = tmp_path_factory.mktemp('data') / 'small'
    texts = [f"def f{i}(x):\n    return x * {i} + {i % 7}\n".encode() * 8 for i in range(200)]
    write_dataset(str(folder), texts, get_tokenizer('byte'), 0.2, 'test')
    return str(folder)


def save(folder, model, tokenizer='byte', **settings):
    """Leave a checkpoint of this model as train.py would, trained with these settings; returns the folder's path."""
    os.makedirs(folder, exist_ok=True)
    save_checkpoint(str(folder), dict(version=CHECKPOINT_VERSION, model=model.float().state_dict(), optimizer={}, step=7,
                                      config=asdict(model.config), settings=settings, tokenizer=tokenizer))
    return str(folder)


def program(*args, cwd=ROOT, ok=True, **env):
    """Run `python args...`; returns the finished process. With ok, it must exit with 0."""
    done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=120,
                          env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': ROOT, **env})
    if ok: assert done.returncode == 0, done.stdout + done.stderr
    return done


def refused(done, *words):
    """The program ended with status 2 and exactly one line on stderr that holds all words."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: '), done.stderr
    for word in words: assert word in lines[0], lines[0]
