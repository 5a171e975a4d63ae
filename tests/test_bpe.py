"""Hugging Face's tokenizer.json, read into a tiktoken Encoding: the same tokens, and every text."""

import json
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from released import NEOX, TOKENIZER, added, write_json

from engine.bpe import GPT2_WORDS, byte_letters, read_tokenizer
from engine.files import UserError
from engine.shards import encode, get_tokenizer

LLAMA_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
               r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
HARD = [
    'hello  he hello    hell\n',
    ' ' * 37 + 'x' + '\t' * 3 + ' \r\n\r\n  \n ',
    "def f(x):\n        return x**2  # can't, WON'T\n",
    '日本語のテキスト，中文。 한국어',
    '👩‍👩‍👧‍👦🙂 émoji e\u0301 a\u0338 >\u0338',
    'مرحبا עברית हिन्दी \u00a0\u2003\u3000',
    '1234567 3.14 ½ ٣',
    '\x00\x01\x7f\x85 \ufffd \ufeff',
    'a <|endoftext|> b <|padding|>\u0338',
    '',
]


def folder_of(path, tokenizer, config=NEOX):
    path.mkdir(exist_ok=True)
    write_json(path / 'tokenizer.json', tokenizer)
    write_json(path / 'config.json', config)
    return str(path)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    return read_tokenizer(folder_of(tmp_path_factory.mktemp('small'), TOKENIZER))


# ---- what it says --------------------------------------------------------------------------------

def test_bytes_have_the_letters_of_gpt2():
    letters = byte_letters()
    assert len(letters) == 256
    assert letters['Ġ'] == ord(' ')
    assert letters['Ċ'] == ord('\n')
    assert letters['A'] == ord('A')
    assert letters['ł'] == 0xa0


def test_merges_added_tokens_and_the_end_of_text(small):
    letters = list(byte_letters().values())
    x = letters.index(ord('x')) + 1
    space = letters.index(ord(' ')) + 1
    assert small.encode_ordinary('hello') == [260]
    assert small.encode_ordinary('hexll') == [257, x, 258]
    assert small.encode_ordinary('x' + ' ' * 7 + 'x') == [x, 262, 261, space, x]
    assert 0 not in small.encode_ordinary('<|endoftext|>')
    assert small.encode('<|endoftext|>x', allowed_special='all') == [0, x]
    assert small.encode('<|endoftext|><|padding|>', allowed_special={'<|padding|>'})[-1] == 264
    assert small.eot_token == 0
    assert small.n_vocab == 265


@pytest.mark.parametrize('text', HARD)
def test_every_text_comes_back(small, text):
    normal = unicodedata.normalize('NFC', text)
    assert small.decode(small.encode_ordinary(text)) == normal
    whole = small.decode(small.encode(text, allowed_special='all'))
    assert unicodedata.normalize('NFC', whole) == normal


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.text(alphabet=st.characters(codec='utf-8') | st.sampled_from(' hel\n'), max_size=30))
def test_any_text_comes_back(small, text):
    normal = unicodedata.normalize('NFC', text)
    assert small.decode(small.encode_ordinary(text)) == normal


def test_bytes_that_are_no_utf8(small):
    """As in tiktoken: U+FFFD in their place; tokens of parts of a character decode to its bytes."""
    tokens = encode(small, b'he\xffllo \xf0\x9f')
    assert small.decode(tokens.tolist()[:-1]) == 'he\ufffdllo \ufffd'
    assert small.decode(small.encode_ordinary('a\ud800b')) == 'a\ufffdb'
    parts = small.encode_ordinary('🙂')
    assert b''.join(small.decode_single_token_bytes(t) for t in parts) == '🙂'.encode()
    assert small.decode(parts[:2]) == '\ufffd'


def test_rows_that_are_no_tokens_decode_to_nothing(small):
    assert small.decode([257, 263, 999, 258]) == 'hell'
    assert small.decode_single_token_bytes(999) == b''


def test_it_goes_where_a_tokenizer_goes(tmp_path):
    folder = folder_of(tmp_path / 'f', TOKENIZER)
    tokenizer = get_tokenizer(f'hf:{folder}')
    assert tokenizer.name == f'hf:{folder}'
    assert encode(tokenizer, b'hello').tolist() == [260, 0]
    assert encode(tokenizer, b'hello').dtype == np.uint16

    larger = dict(TOKENIZER, added_tokens=[*TOKENIZER['added_tokens'], added(70_000, '<|far|>')])
    far = read_tokenizer(folder_of(tmp_path / 'g', larger, dict(NEOX, eos_token_id=[70_000, 1])))
    assert encode(far, b'hello').tolist() == [260, 70_000]


# ---- against the library -------------------------------------------------------------------------

def trained(words, ignore_merges, nfc, runs_of_spaces):
    """A tokenizer.json that the library `tokenizers` learned from HARD and Python."""
    library = pytest.importorskip('tokenizers')
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
    tokenizer = library.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if words is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(words), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=['<|endoftext|>'],
                                  show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    with open(__file__, encoding='utf-8') as f:
        tokenizer.train_from_iterator([*HARD, f.read()], trainer)
    if runs_of_spaces:
        tokenizer.add_tokens([AddedToken(' ' * n, normalized=True) for n in range(24, 1, -1)])
    tokenizer.add_special_tokens([AddedToken('<|padding|>', normalized=False)])
    return tokenizer


@pytest.mark.parametrize('words, ignore_merges, nfc, runs_of_spaces', [
    pytest.param(None, False, True, True, id='GPT-NeoX'),
    pytest.param(LLAMA_WORDS, True, False, False, id='Llama 3'),
    pytest.param(LLAMA_WORDS.replace('{1,3}', ''), False, True, False, id='Qwen'),
])
def test_the_same_tokens_as_the_library(words, ignore_merges, nfc, runs_of_spaces, tmp_path):
    theirs = trained(words, ignore_merges, nfc, runs_of_spaces)
    folder = folder_of(tmp_path / 'f', json.loads(theirs.to_str()))
    ours = read_tokenizer(folder)
    assert ours.n_vocab == theirs.get_vocab_size()
    draw = np.random.default_rng(0)
    letters = [*' \n\t_(9>', '  ', "'s", 'e\u0301', '日', '🙂', '<|endoftext|>', '<|padding|>']
    texts = [*HARD, *(''.join(draw.choice(letters, 12)) for _ in range(300))]
    for text in texts:
        want = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, allowed_special='all') == want, repr(text)


# ---- what is refused -----------------------------------------------------------------------------

MODEL = TOKENIZER['model']


@pytest.mark.parametrize('change, words', [
    (dict(model=dict(MODEL, type='WordPiece')), 'a model of type WordPiece'),
    (dict(model=dict(MODEL, byte_fallback=True)), 'byte_fallback'),
    (dict(model=dict(MODEL, dropout=0.1)), 'dropout'),
    (dict(model=dict(MODEL, merges=MODEL['merges'][::-1])), 'lower number'),
    (dict(model=dict(MODEL, merges=['h e', 'l l', 'h e'])), 'lower number'),
    (dict(model=dict(MODEL, merges=MODEL['merges'][:-1])), "'hello', which no merge makes"),
    (dict(model=dict(MODEL, vocab={'<|endoftext|>': 0}, merges=[])), 'without the byte 0'),
    (dict(model=dict(MODEL, merges=['h z'])), 'not a readable tokenizer'),
    (dict(normalizer=dict(type='Lowercase')), 'normalizer Lowercase'),
    (dict(pre_tokenizer=dict(type='Whitespace')), 'pre_tokenizer Whitespace'),
    (dict(pre_tokenizer=dict(type='ByteLevel', add_prefix_space=True)), 'add_prefix_space'),
    (dict(pre_tokenizer=dict(type='ByteLevel', add_prefix_space=False, use_regex=False)),
     'use_regex=false'),
    (dict(pre_tokenizer=dict(type='Sequence', pretokenizers=[
        dict(type='Split', pattern=dict(Regex=GPT2_WORDS), behavior='Removed'),
        dict(type='ByteLevel', add_prefix_space=False, use_regex=False)])), 'Removed'),
    (dict(pre_tokenizer=dict(type='Sequence', pretokenizers=[
        dict(type='Split', pattern=dict(Regex='('), behavior='Isolated'),
        dict(type='ByteLevel', add_prefix_space=False, use_regex=False)])), 'not a readable'),
    (dict(added_tokens=[dict(added(0, '<|endoftext|>'), lstrip=True)]), 'lstrip=true'),
    (dict(added_tokens=[dict(added(0, '<|endoftext|>'), id='0')]), 'not a readable tokenizer'),
    (dict(added_tokens=None), 'not a readable tokenizer'),
])
def test_other_tokenizers_are_one_line(change, words, tmp_path):
    folder = folder_of(tmp_path / 'f', {**TOKENIZER, **change})
    with pytest.raises(UserError, match=f'tokenizer.json: .*{words}') as error:
        read_tokenizer(folder)
    assert '\n' not in str(error.value)


def test_without_an_end_of_text(tmp_path):
    config = dict(NEOX, eos_token_id=None)
    folder = folder_of(tmp_path / 'f', TOKENIZER, config)
    assert read_tokenizer(folder).eot_token == 0            # <|endoftext|>
    folder = folder_of(tmp_path / 'f', dict(TOKENIZER, added_tokens=[added(264, '<|x|>')]), config)
    with pytest.raises(UserError, match='neither eos_token_id'):
        read_tokenizer(folder)


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(UserError, match='no tokenizer.json'):
        read_tokenizer(str(tmp_path))
    (tmp_path / 'tokenizer.json').write_text('[' * 100_000)
    with pytest.raises(UserError, match='not a readable tokenizer'):
        read_tokenizer(str(tmp_path))
