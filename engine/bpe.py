"""
Hugging Face's tokenizer.json as a tiktoken Encoding: byte-level BPE, as GPT-NeoX, Llama 3 and Qwen
have it.

    tokenizer = read_tokenizer(folder)          of folder/tokenizer.json and config.json
    tokens = tokenizer.encode_ordinary(text)    what the library `tokenizers` says, without the
                                                tokens that it may put around a text
    text = tokenizer.decode(tokens)

Text is cut at added tokens, such as GPT-NeoX's runs of spaces, the rest into words by a pattern;
the bytes of each word are merged pair by pair. tiktoken merges the pair whose result has the lowest
number, tokenizer.json lists pairs in their order: both are the same in a list that was learned,
where numbers grow along it. That they grow is checked.
"""

import json
import os
import re
import unicodedata

import numpy as np
import tiktoken

from engine.files import UserError

# the pattern of a pre-tokenizer that does not say one: GPT-2's
GPT2_WORDS = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class Unsupported(ValueError):
    """A tokenizer.json that asks for something else."""


class FolderEncoding(tiktoken.Encoding):
    """
    A tiktoken Encoding that knows added tokens: `special` ones (<|endoftext|>) are text unless they
    are allowed, the others are found in every text. A model may have more rows than there are
    tokens: such a token decodes to nothing.
    """

    def __init__(self, name, pattern, ranks, added, eot, nfc):
        """
        ranks: {bytes: token}. added: the list in tokenizer.json. eot: the token between documents.
        nfc: whether text is normalised to NFC.
        """
        numbers = {entry['content']: entry['id'] for entry in added}
        super().__init__(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=numbers)
        self.numbers = numbers
        self.special = {entry['content'] for entry in added if entry['special']}
        # these are looked for after normalisation, the others before
        self.late = {entry['content'] for entry in added if entry['normalized']} if nfc else set()
        self.nfc = nfc
        self.eot = eot

    @property
    def eot_token(self):
        return self.eot

    def encode(self, text, *, allowed_special=frozenset(), disallowed_special=()):
        """As tiktoken's; allowed_special='all' is what `tokenizers` does."""
        allowed = self.special if allowed_special == 'all' else self.special & set(allowed_special)
        found = (self.numbers.keys() - self.special) | allowed
        # a surrogate alone is no character: U+FFFD, as in tiktoken
        text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
        tokens = []
        for part in split(text, found - self.late):
            if part in found - self.late:
                tokens.append(self.numbers[part])
                continue
            part = unicodedata.normalize('NFC', part) if self.nfc else part
            for piece in split(part, found & self.late):
                if piece in found & self.late:
                    tokens.append(self.numbers[piece])
                else:
                    tokens += super().encode_ordinary(piece)
        return tokens

    def encode_ordinary(self, text):
        return self.encode(text)

    def encode_to_numpy(self, text, *, allowed_special=frozenset(), disallowed_special=()):
        return np.array(self.encode(text, allowed_special=allowed_special), dtype=np.uint32)

    def decode_single_token_bytes(self, token):
        try:
            return super().decode_single_token_bytes(token)
        except KeyError:
            return b''

    def decode_bytes(self, tokens):
        return b''.join(self.decode_single_token_bytes(token) for token in tokens)

    def decode(self, tokens, errors='replace'):
        return self.decode_bytes(tokens).decode('utf-8', errors)


def split(text, found):
    """Cut a text before and after each of these strings, the longest where several begin."""
    if not found:
        return [text]
    longest_first = sorted(found, key=len, reverse=True)
    pattern = '|'.join(re.escape(string) for string in longest_first)
    return [part for part in re.split(f'({pattern})', text) if part]


# ---- tokenizer.json ------------------------------------------------------------------------------

def read_tokenizer(folder):
    """
    The FolderEncoding of a Hugging Face folder, named hf:FOLDER. UserError if there is no
    tokenizer.json, or it is none of these tokenizers.
    """
    path = os.path.join(folder, 'tokenizer.json')
    try:
        with open(path, encoding='utf-8') as f:
            file = json.load(f)
        pattern = pattern_of(file['pre_tokenizer'])
        nfc = has_nfc(file.get('normalizer'))
        added = [dict(special=False, normalized=False) | entry for entry in file['added_tokens']]
        refuse_added(added)
        eot = end_of_text(folder, added)
        ranks = ranks_of(file['model'], {entry['content'] for entry in added})
        return FolderEncoding(f'hf:{folder}', pattern, ranks, added, eot, nfc)
    except FileNotFoundError:
        raise UserError(f"{folder}: no tokenizer.json in it, so there are no texts for this model: "
                        "put the one of the model there") from None
    except Unsupported as error:
        raise UserError(f"{path}: {error} is not supported, only byte-level BPE as in GPT-NeoX, "
                        "Llama 3 and Qwen") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = ' '.join(f"{type(error).__name__}: {error}".split())[:120]
        raise UserError(f"{path}: not a readable tokenizer ({reason})") from None


def pattern_of(pre_tokenizer):
    """
    The pattern that cuts text into words: of a ByteLevel step alone, or of a Split step before it.
    """
    steps = [pre_tokenizer]
    if pre_tokenizer['type'] == 'Sequence':
        steps = pre_tokenizer['pretokenizers']
    kinds = [step['type'] for step in steps]
    if kinds not in (['ByteLevel'], ['Split', 'ByteLevel']):
        raise Unsupported(f"pre_tokenizer {' + '.join(kinds)}")
    if steps[-1].get('add_prefix_space', True):
        raise Unsupported("add_prefix_space=true")
    uses_own = steps[-1].get('use_regex', True)
    if uses_own != (len(steps) == 1):
        raise Unsupported(f"use_regex={str(uses_own).lower()} in this pre_tokenizer")
    if uses_own:
        return GPT2_WORDS
    if steps[0]['behavior'] != 'Isolated' or steps[0].get('invert'):
        raise Unsupported(f"pre_tokenizer Split with behavior {steps[0]['behavior']}")
    # what the pattern leaves out stays, character by character
    return f"(?:{steps[0]['pattern']['Regex']})|(?s:.)"


def has_nfc(normalizer):
    """Whether text is normalised to NFC; Unsupported for other normalisations."""
    if normalizer is None or normalizer == {'type': 'Sequence', 'normalizers': []}:
        return False
    if normalizer['type'] != 'NFC':
        raise Unsupported(f"normalizer {normalizer['type']}")
    return True


def refuse_added(added):
    for entry in added:
        for key in ('lstrip', 'rstrip', 'single_word'):
            if entry.get(key):
                raise Unsupported(f"{key}=true of the added token {entry['content']!r}")
        if type(entry['content']) is not str or type(entry['id']) is not int or entry['id'] < 0:
            raise TypeError(f"added token {entry}")


def end_of_text(folder, added):
    """The token between documents: eos_token_id of config.json, or <|endoftext|>."""
    with open(os.path.join(folder, 'config.json'), encoding='utf-8') as f:
        eos = json.load(f).get('eos_token_id')
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if type(eos) is int:
        return eos
    for entry in added:
        if entry['content'] == '<|endoftext|>':
            return entry['id']
    raise ValueError("neither eos_token_id in config.json nor <|endoftext|> among its tokens")


# ---- the vocabulary ------------------------------------------------------------------------------

def byte_letters():
    """
    {letter: byte} of the alphabet in which tokenizer.json writes bytes: those that are printable in
    Latin-1 stand for themselves, the others, in their order, for the letters from U+0100 on.
    """
    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in printable:
            letters[chr(0x100 + len(letters) - len(printable))] = byte
    return letters


def ranks_of(model, added):
    """{bytes: token} of the model in tokenizer.json; Unsupported where it is no byte-level BPE."""
    refuse_other_kinds(model)
    merged = merged_tokens(model)
    one_piece = model.get('ignore_merges', False)    # a whole word may be a token without merges
    letters = byte_letters()
    ranks = {}
    for token, number in model['vocab'].items():
        if token in added and token not in merged:
            continue                        # an added token that is listed here too
        if len(token) > 1 and token not in merged and not one_piece:
            raise Unsupported(f"the token {token!r}, which no merge makes,")
        if not set(token) <= letters.keys():
            raise Unsupported(f"the token {token!r}, which is not written in bytes,")
        ranks[bytes(letters[letter] for letter in token)] = number
    refuse_missing_bytes(ranks)
    return ranks


def refuse_other_kinds(model):
    """Unsupported where the model is not BPE, or BPE with an option that changes its tokens."""
    if model.get('type', 'BPE') != 'BPE':
        raise Unsupported(f"a model of type {model['type']}")
    for key in ('dropout', 'continuing_subword_prefix', 'end_of_word_suffix', 'byte_fallback'):
        if model.get(key):
            raise Unsupported(f"{key}={model[key]!r}")


def refuse_missing_bytes(ranks):
    """Unsupported where a byte that may stand in a text is no token: 0xf5 and above never do."""
    missing = [byte for byte in range(0xf5) if bytes([byte]) not in ranks]
    if set(missing) - {0xc0, 0xc1}:         # nor do these two, in UTF-8
        raise Unsupported(f"a vocabulary without the byte {missing[0]}")


def merged_tokens(model):
    """The tokens that merges make; Unsupported unless their numbers grow along the list."""
    vocabulary = model['vocab']
    merged = {}
    last = -1
    for merge in model['merges']:
        left, right = merge.split(' ') if isinstance(merge, str) else merge
        token = left + right
        number = vocabulary[token]
        if number <= last:
            raise Unsupported(f"the merge of {left!r} and {right!r}, whose token has a lower "
                              "number than the one before,")
        merged[token] = last = number
    return merged
