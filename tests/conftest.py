"""
Shared by all tests: the toggles every promise is tested over, small models, and a way to run the
programs.
"""

import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
from engine.build import new_model
from engine.checkpoint import save_checkpoint
from engine.flops import flops_per_token
from engine.generate import generate, left_pad
from engine.shards import get_tokenizer
from model import Attention, GPTConfig
from prepare_data import write_dataset

# the models here are far too small for more, and a busy machine makes threads wait for each other
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption('--slow', action='store_true', help='the long versions of some tests too')


def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: runs only with --slow')


def pytest_collection_modifyitems(config, items):
    if config.getoption('--slow'):
        return
    for item in items:
        if item.get_closest_marker('slow'):
            item.add_marker(pytest.mark.skip(reason='needs --slow'))


def slow_but(quick, names):
    """Of parametrize's names, those that are not in `quick` run with --slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow)
            for name in names]


DEPTH = dict(depth_attn=True)
DEPTH_GQA = dict(depth_attn=True, n_kv_head=2)
SMEAR = dict(ponder='smear')
EMBEDDING = dict(ponder='embedding', ponder_steps=2)
LATENT = dict(ponder='latent', ponder_steps=1)
LATENT_2 = dict(ponder='latent', ponder_steps=2)
CHAIN = dict(ponder='chain', ponder_steps=2)
LOOP = dict(ponder='loop', ponder_steps=2)
PAUSE = dict(ponder='pause', ponder_steps=2)
FEEDBACK = dict(ponder='feedback')
GATE = dict(EMBEDDING, halting='gate', halt_tau=0.45)
MASK = dict(LATENT, halting='mask', halt_tau=0.4)
MASK_2 = dict(LATENT_2, halting='mask', halt_tau=0.3)
ROUTER = dict(CHAIN, halting='router', halt_tau=0.3)
EXIT = dict(LOOP, halting='exit', halt_tau=0.6, exit_loss='uniform')
OURO = dict(LOOP, loop_norm=True, halting='ouro', halt_tau=0.4)

TOGGLES = {
    'plain': {},
    'plain_gqa': dict(n_kv_head=1, tie_embeddings=True),
    'depth': DEPTH,
    'depth_gqa_stride1': dict(DEPTH_GQA, depth_stride=1),
    'depth_uniform': dict(DEPTH, depth_mode='uniform', qk_norm=False),
    'smear': SMEAR,
    'smear_depth': dict(SMEAR, **DEPTH_GQA),
    'embedding': EMBEDDING,
    'embedding_depth': dict(EMBEDDING, **DEPTH_GQA),
    'embedding_topk': dict(EMBEDDING, ponder_topk=5),
    'latent': LATENT,
    'latent2_depth': dict(LATENT_2, **DEPTH_GQA),
    'chain': CHAIN,
    'chain_depth': dict(CHAIN, **DEPTH_GQA),
    'loop': LOOP,
    'loop_depth': dict(LOOP, **DEPTH_GQA),
    'pause': PAUSE,
    'pause_depth': dict(PAUSE, **DEPTH_GQA),
    'feedback': FEEDBACK,
    'feedback_depth': dict(FEEDBACK, **DEPTH_GQA),
    'gate': GATE,
    'gate_depth': dict(GATE, **DEPTH_GQA),
    'mask': MASK,
    'mask2_depth': dict(MASK_2, **DEPTH_GQA),
    'router': ROUTER,
    'router_depth': dict(ROUTER, **DEPTH_GQA),
    'loop_norm': dict(LOOP, loop_norm=True),
    'exit': EXIT,
    'ouro': OURO,
    'exit_depth': dict(EXIT, **DEPTH_GQA),
}

# one toggle of each mechanism, for tests that take seconds
ONE_EACH = ('plain', 'depth', 'smear', 'embedding', 'latent2_depth', 'chain_depth', 'loop_depth',
            'pause', 'feedback_depth', 'gate', 'mask', 'router_depth', 'exit', 'ouro')


def make(seed=0, **settings):
    """
    A small float64 model in eval mode with weights large enough that every part matters. If it
    trains, then as at the end of a run, with the first of what it may draw.
    """
    torch.manual_seed(seed)
    small = dict(vocab_size=64, n_tokens=50, block_size=24, n_layer=5, n_head=4, n_embd=32,
                 mlp_hidden=48, init_std=0.2)
    if settings.get('ponder') == 'latent':
        tokens = settings.get('block_size', 24) + 1
        thoughts = settings.get('ponder_steps', 3)
        small.update(n_layer=3, jacobi_iters=tokens * thoughts)  # exact for a full context
    if settings.get('ponder') == 'feedback':
        small.update(n_layer=3, ponder_steps=settings.get('block_size', 24))    # exact as well
    model = new_model(GPTConfig(**{**small, **settings})).double().eval()
    model.mechanism.progress, model.mechanism.drawn = 1.0, model.mechanism.draws()[0]
    for name, p in model.named_parameters():
        if p.dim() != 1:
            continue
        if name.startswith(('mechanism.gate', 'mechanism.router.')):
            torch.nn.init.zeros_(p)  # some tokens halt, some do not
        else:
            torch.nn.init.uniform_(p, 0.5, 1.5)  # norm gains that are not all 1
    return model


def close(a, b, tol=1e-10):
    """Equal up to tol, and -inf at the same places. NaN equals nothing."""
    assert torch.equal(a.isneginf(), b.isneginf())
    assert (a - b)[~a.isneginf()].abs().max() < tol


@pytest.fixture(scope='session', autouse=True)
def flops_counted_once():
    """
    Runs, and the mistakes in exercises/flops.py, are of few models, and to count a model takes
    longer than to train it.
    """
    counted = {}

    def count_once(gpt, T=None, training=True, texts=1):
        key = repr((gpt.config, T, training, texts))
        if key not in counted:
            counted[key] = flops_per_token(gpt, T, training, texts)
        return counted[key]

    with pytest.MonkeyPatch.context() as patch:
        for reader in 'log', 'flops':   # an exercise reads the second, when it is loaded
            patch.setattr(f'engine.{reader}.flops_per_token', count_once)
        yield


@pytest.fixture(autouse=True)
def restore_attention():
    """tune_cpu and without_cudnn_attention choose attention kernels for the whole process."""
    kernel = Attention.kernel
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    Attention.kernel = staticmethod(kernel)


@pytest.fixture(params=TOGGLES)
def toggle(request):
    """Settings of one toggle; a test that takes this runs once per toggle."""
    return TOGGLES[request.param]


@pytest.fixture(params=slow_but(ONE_EACH, TOGGLES))
def one_of_each(request):
    """The same; without --slow once per mechanism."""
    return TOGGLES[request.param]


def rows_of(model, prompts, n):
    """Each prompt with n likeliest tokens more, from one batch; a plain loop gives the same."""
    rows = generate(model, prompts, n, temperature=0)
    tokens, pad = left_pad(prompts, model.config, 'cpu')
    new, memory = tokens, model.new_memory(pad)
    for _ in range(n):
        with torch.no_grad():
            new = model.head(model.hidden(new, memory)[:, -1:]).argmax(-1)
        tokens = torch.cat((tokens, new), dim=1)
    for row, padded in zip(rows, tokens):
        assert padded[-len(row):].tolist() == row.tolist()
    return rows


class Compiler:
    """
    A backend for torch.compile that counts its graphs. It traces and differentiates as on a GPU,
    but needs no compiler.
    """

    def __init__(self):
        self.graphs = 0
        self.compile_function = torch.compile

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend('aot_eager')(graph, inputs)

    def compile(self, function, **settings):
        """torch.compile with this backend; what is compiled must be one graph."""
        return self.compile_function(function, backend=self, fullgraph=True, **settings)


@pytest.fixture
def compiler(monkeypatch):
    torch._dynamo.reset()  # forget what other tests compiled
    compiler = Compiler()
    monkeypatch.setattr(torch, 'compile', compiler.compile)
    # compile_blocks sets both, for all that follows
    with torch._dynamo.config.patch(recompile_limit=128, optimize_ddp=True):
        yield compiler


@pytest.fixture
def idx():
    return torch.randint(0, 50, (3, 13), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope='session')
def small_data(tmp_path_factory):
    """A data folder of byte tokens, about 60 kB of text; returns its path."""
    folder = tmp_path_factory.mktemp('data') / 'small'
    texts = []
    for i in range(200):
        function = f"def f{i}(x):\n    return x * {i} + {i % 7}\n"
        texts.append(function.encode() * 8)
    write_dataset(str(folder), texts, get_tokenizer('byte'), 0.2, 'test')
    return str(folder)


def save(folder, model, tokenizer='byte', **settings):
    """
    Leave a checkpoint of this model as train.py would, trained with these settings; returns the
    folder's path.
    """
    os.makedirs(folder, exist_ok=True)
    checkpoint = dict(model=model.float().state_dict(), optimizer={}, step=7,
                      config=asdict(model.config), settings=settings, tokenizer=tokenizer)
    save_checkpoint(str(folder), checkpoint)
    return str(folder)


def program(*args, cwd=ROOT, ok=True, **env):
    """Run `python args...`; returns the finished process. With ok, it must exit with 0."""
    command = [sys.executable, *map(str, args)]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': ROOT, **env}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True,
                          timeout=120)
    if ok:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


class Evil:
    """Unpickled by anything that executes what it reads, it leaves a folder."""

    def __reduce__(self):
        return os.mkdir, ('executed',)


def refused(done, *words):
    """The program ended with status 2 and exactly one line on stderr that holds all words."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('error: '), done.stderr
    for word in words:
        assert word in lines[0], lines[0]


def cells(out):
    """The cells of the tables in what was printed, line by line, without the rules."""
    lines = [line.strip('|').split('|') for line in out.splitlines() if line.startswith('| ')]
    return [[cell.strip() for cell in line] for line in lines if ''.join(line).strip(' -')]
