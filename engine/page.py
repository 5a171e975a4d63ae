"""
The page of tools/explain.py --html: what its `look` saw in one or two models, as JSON in the
template page.html. T tokens were read; n is the most steps that one of them took.

    tokens      the T tokens, as numbers
    counts      of each, whether the token behind it is to be predicted: on a made task an answer's
    text        [{text, count}]: the smallest pieces that are whole characters, and how many tokens
                each takes
    words       {number: what it is called}, of every token on the page
    models      one or two: {name, about, tau, output}, and as lists the fields of explain.py's Seen
                (all but logits), whose docstring and comments say what they are

    name        the checkpoint's folder
    about       the model's mechanisms, in words
    tau         what `compared` is compared with; null if nothing is
    after       n readings, one per step
    output      one more reading, of the model's own logits
    a reading   {likeliest (T,top), p (T,top), loss (T), entropy (T)}: the best guesses, their
                probabilities, and in nats the loss of the token that came next (null for the last
                token) and the entropy

tools/serve.py sends the same of each model by itself, as each writes a text of its own.
"""

import codecs
import hashlib
import html
import json
import os
import re

import torch
from torch.nn import functional as F

from engine.files import UserError, on_disk, whole
from engine.mechanisms import switched_on

TEMPLATE = os.path.join(os.path.dirname(os.path.realpath(__file__)), 'page.html')
END = '∎'           # how the end of a text is shown; the template begins a new line after it
MOST_TOKENS = 512


def write_page(path, models, tokens, counts, tokenizer):
    """
    Writes the page of these tokens (T,) and returns its size in bytes. models: what `model_data`
    returns, for one or two.
    """
    page = fill_template(page_data(models, tokens.tolist(), counts, tokenizer)).encode()
    with on_disk(path, 'written'):
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        with whole(path, 'wb') as f:
            f.write(page)
    return len(page)


# ---- the data ------------------------------------------------------------------------------------

def page_data(models, numbers, counts, tokenizer):
    """Everything the page knows, as described at the top. numbers: a list, of the tokens."""
    if len(numbers) > MOST_TOKENS:
        raise UserError(f"the text has {len(numbers)} tokens, a page shows up to {MOST_TOKENS}: "
                        "shorten it")
    shown = set(numbers)
    for model in models:
        for reading in (*model['after'], model['output']):
            shown.update(token for row in reading['likeliest'] for token in row)
    words = {}
    for token in sorted(shown):
        words[token] = bytes_of(token, tokenizer).decode('utf-8', 'backslashreplace')
    return dict(tokens=numbers, counts=counts, text=pieces_of(numbers, tokenizer), words=words,
                models=models)


def model_data(seen, config, name, tokens, top):
    """What look() returned for a model that read tokens (T,), as plain lists."""
    top = min(top, config.n_tokens)
    about = [switched_on(config)]
    if seen.kind == 'state':
        about.append("read token by token")
    if config.ponder == 'latent':
        about.append("read by iteration")
    return dict(
        name=name,
        about=', '.join(about),
        kind=seen.kind,
        steps=seen.steps.tolist(),
        compared=[rounded(decided, 6) for decided in seen.compared],
        tau=config.halt_tau if seen.compared else None,
        after=[reading(logits, tokens, top) for logits in seen.after],
        output=reading(seen.logits, tokens, top),
        mixed=seen.mixed.tolist(),
        moved=None if seen.moved is None else rounded(seen.moved, 4),
        values=None if seen.values is None else rounded(seen.values, 3),
    )


def reading(logits, tokens, top):
    """The best guesses, losses and entropies of logits (T,V); row i predicts token i + 1."""
    logits = logits.float()
    p = logits.softmax(-1)
    best = p.topk(top)
    losses = F.cross_entropy(logits[:-1], tokens[1:], reduction='none')
    return dict(likeliest=best.indices.tolist(), p=rounded(best.values, 4),
                loss=[*rounded(losses, 4), None], entropy=rounded(torch.special.entr(p).sum(-1), 3))


def rounded(values, digits):
    """A tensor as lists of numbers that are short to write."""
    return values.cpu().double().round(decimals=digits).tolist()


def pieces_of(numbers, tokenizer):
    """
    [{text, count}]: the text in its smallest pieces that are whole characters, and how many tokens
    each takes. Bytes that are no character are written \\xff.
    """
    utf8 = codecs.getincrementaldecoder('utf-8')('backslashreplace')
    pieces, text, count = [], '', 0
    for i, token in enumerate(numbers, start=1):
        text += utf8.decode(bytes_of(token, tokenizer), final=i == len(numbers))
        count += 1
        begun, _ = utf8.getstate()      # bytes of a character that has not ended
        if not begun:
            pieces.append(dict(text=text, count=count))
            text, count = '', 0
    return pieces


def bytes_of(token, tokenizer):
    """A token's bytes, or those of END."""
    if token == tokenizer.eot_token:
        return END.encode()
    return tokenizer.decode_single_token_bytes(token)


# ---- the file ------------------------------------------------------------------------------------

def fill_template(data, names=None, live=''):
    """
    The page: the template with data in it, which can hold anything and never becomes markup.
    names: of the models, if data is None; live: markup in front, which is to bring the data.
    """
    data_json = as_script(data)
    names = names or [model['name'] for model in data['models']]
    parts = dict(
        TITLE=html.escape(f"What {' against '.join(names)} thinks"),
        LIVE=live,
        # an id of its own, for two pages in one document
        ROOT='think-' + hashlib.sha256(data_json.encode()).hexdigest()[:8],
        DATA=data_json,
    )
    with open(TEMPLATE, encoding='utf-8') as f:
        template = f.read()
    return re.sub(r'\{\{(\w+)\}\}', lambda match: parts[match[1]], template)


def as_script(data):
    """JSON that can stand in a <script>."""
    text = json.dumps(data, separators=(',', ':'))
    return text.replace('&', '\\u0026').replace('<', '\\u003c').replace('>', '\\u003e')
