"""Models fetched from a server that does everything wrong."""

import io
import json
import os

import pytest
import torch
from released import NEOX, TOKENIZER, logits, random_weights, write_folder
from test_download import server  # noqa: F401  a fixture
from test_released import write_shards

from engine import download
from engine.files import UserError
from tools import hf
from tools.hf import load_released

REPOSITORY = 'zeng123/PonderLM-2-Pythia-410m'


@pytest.fixture
def hub(server, tmp_path, monkeypatch):  # noqa: F811
    """The server as a mirror of Hugging Face with one model in shards; tmp_path is current."""
    monkeypatch.setenv('HF_ENDPOINT', server.url)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'origin'
    write_folder(folder, NEOX, tokenizer=True)
    os.remove(folder / 'model.safetensors')
    write_shards(folder, random_weights(NEOX), 2)
    (folder / 'modeling.py').write_text('import os\n')
    server.files = {}
    for name in os.listdir(folder):
        server.files[address(name)] = (folder / name).read_bytes()
    return server


def address(name):
    return f'/{REPOSITORY}/resolve/main/{name}'


def fetch():
    hf.main(['fetch', REPOSITORY, 'models/m'])


def asked(hub):
    """The names of the files that were asked for."""
    return [path.removeprefix(address('')) for path, _ in hub.seen]


SHARDS = ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']


def test_a_model_arrives_whatever_the_server_does(hub, capsys):
    hub.script = ['garbage', 'cut', '500', 'page', 'ok', 'redirect', 'ok', 'ok', '503', 'ok', 'cut',
                  'ignores range', 'bit', 'too short', 'noise', 'redirect', 'garbage', 'too long']
    fetch()
    assert 'python sample.py hf:models/m' in capsys.readouterr().out
    assert sorted(os.listdir('models/m')) == sorted(
        ['config.json', 'tokenizer.json', 'model.safetensors.index.json', *SHARDS])
    tokens = torch.arange(8)[None]
    model = load_released('models/m').double()
    assert torch.allclose(model(tokens)[0], logits(tokens, random_weights(NEOX), NEOX), atol=1e-5)


def test_again_only_what_is_missing_or_damaged_is_fetched(hub):
    fetch()
    with open(f'models/m/{SHARDS[1]}', 'r+b') as f:
        f.truncate(1000)
    os.remove('models/m/tokenizer.json')
    hub.seen.clear()
    fetch()
    assert asked(hub) == ['tokenizer.json', 'model.safetensors', SHARDS[1]]
    load_released('models/m')


def test_the_next_run_goes_on_where_the_line_broke(hub):
    hub.script = ['ok', 'ok', 'ok', 'ok', 'ok', 'cut'] + ['500'] * 20
    with pytest.raises(UserError, match='same command'):
        fetch()
    have = os.path.getsize(f'models/m/{SHARDS[1]}.part')
    assert have > 0
    hub.script = []
    hub.seen.clear()
    fetch()
    assert hub.seen[-1] == (address(SHARDS[1]), f'bytes={have}-')
    load_released('models/m')


def test_a_checksum_that_the_server_states(hub):
    content = bytearray(hub.files[address(SHARDS[0])])
    content[-1] ^= 1                                # the header is right, a number is not
    os.makedirs('models/m')
    with open(f'models/m/{SHARDS[0]}.part', 'wb') as f:
        f.write(content)
    hub.script = ['ok', 'ok', 'ok', 'ok', 'redirect']
    fetch()
    with open(f'models/m/{SHARDS[0]}', 'rb') as f:
        assert f.read() == hub.files[address(SHARDS[0])]


def test_only_a_pytorch_model_bin_and_no_tokenizer(hub, capsys):
    content = io.BytesIO()
    torch.save(random_weights(NEOX), content)
    hub.files = {address('config.json'): hub.files[address('config.json')],
                 address('pytorch_model.bin'): content.getvalue()}
    hub.script = ['ok', 'ok', 'ok', 'ok', 'garbage']
    fetch()
    assert 'no tokenizer.json' in capsys.readouterr().out
    assert sorted(os.listdir('models/m')) == ['config.json', 'pytorch_model.bin']
    load_released('models/m')


def test_progress(hub, monkeypatch, capsys):
    monkeypatch.setattr(download.Progress, '__init__', progress_of_every_block)
    fetch()
    size = len(hub.files[address(SHARDS[1])])
    assert f"models/m/{SHARDS[1]}: 100% of" in capsys.readouterr().out
    assert os.path.getsize(f'models/m/{SHARDS[1]}') == size


def progress_of_every_block(self, what, total):
    self.what, self.total, self.first = what, total, None
    self.start = self.shown = -1.0
    self.interval, self.on_terminal, self.end = 0, False, '\n'


# ---- what is refused -----------------------------------------------------------------------------

@pytest.mark.parametrize('repository', ['pythia', '../x/y', 'a/b/c', '/etc/passwd', 'a/..', 'a/b?'])
def test_no_repository(hub, repository):
    with pytest.raises(UserError, match='OWNER/NAME'):
        hf.main(['fetch', repository, 'models/m'])
    assert hub.seen == []


@pytest.mark.parametrize('change, words', [
    ({'config.json': None}, 'config.json: status 404'),
    ({'config.json': dict(NEOX, model_type='bert')}, "model_type='bert'"),
    ({'model.safetensors.index.json': None}, 'has no weights'),
    ({'model.safetensors.index.json': dict(weight_map=dict(a='../../a.safetensors'))}, 'no name'),
])
def test_what_cannot_be_used_is_not_downloaded(hub, change, words):
    for name, content in change.items():
        del hub.files[address(name)]
        if content is not None:
            hub.files[address(name)] = json.dumps(content).encode()
    with pytest.raises(UserError, match=words):
        fetch()
    assert SHARDS[0] not in asked(hub)
    assert not os.path.exists('a.safetensors')


def test_a_page_in_the_place_of_a_file(hub):
    hub.script = ['page'] * 30
    with pytest.raises(UserError, match='config.json.*no JSON object'):
        fetch()
    assert not os.path.exists('models/m/config.json')


def test_the_tokenizer_works(hub):
    fetch()
    with open('models/m/tokenizer.json', encoding='utf-8') as f:
        assert json.load(f) == json.loads(json.dumps(TOKENIZER))
