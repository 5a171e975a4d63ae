"""
A trained model, for the programs that ask one: from its folder, with what its checkpoint says of
the run.
"""

import sys

import torch

from engine.answers import KEPT, exam_of_data
from engine.checkpoint import load_checkpoint, model_of, with_halting, with_own_weights
from engine.files import UserError
from engine.generate import check_pieces
from engine.hardware import check_causal, pick_device, without_cudnn_attention
from engine.shards import get_tokenizer, identity, knows_tokens, one_tokenizer, read_meta


def load_model(folder, device, dtype='float32', halting=None):
    """
    Of a checkpoint folder, or hf:FOLDER: (the model in eval mode on `device` and in `dtype`, its
    tokenizer, {name: value} of train.py's settings, and of what else the run kept: its data's
    description, its exam, the precision it computed in). halting: a rule it was not trained with.
    UserError if there is no checkpoint.
    """
    device, dtype = pick_device(device), getattr(torch, dtype)
    check_causal(device, dtype)
    state = load_checkpoint(folder)
    if halting is not None:
        state = with_halting(state, halting)
    model = model_of(state)
    without_cudnn_attention()
    tokenizer = get_tokenizer(state['tokenizer'])
    n_tokens = model.config.n_tokens
    if not knows_tokens(n_tokens, tokenizer.name, tokenizer.n_vocab):
        raise UserError(f"{folder}: {tokenizer.name} has {tokenizer.n_vocab} tokens, the model "
                        f"{n_tokens}: take another checkpoint")
    if not one_tokenizer(state, identity(tokenizer)):
        raise UserError(f"{folder}: in {tokenizer.name} lies another tokenizer than this model was "
                        "trained with: put its own there")
    kept = {name: state[name] for name in ('train_data', 'val_data', 'exam', 'precision')
            if name in state}
    model = with_own_weights(model.to(device, dtype), state).eval()
    check_pieces(model)
    return model, tokenizer, {**state['settings'], **kept}


def only(folders, example):
    """The one folder that is named."""
    if len(folders) != 1:
        raise UserError(f"name one checkpoint folder, such as: {example}")
    return folders[0]


def data_dir_of(settings):
    """
    The data a model was trained on, of `settings` from load_model; UserError without any, or if
    another lies there now.
    """
    if 'data_dir' not in settings:
        raise UserError("an hf: folder has no validation set: name a text (tools/explain.py, "
                        "tools/plot.py: --start=FILE:path) or data (tools/choices.py: "
                        "--data_dir=FOLDER)")
    folder = settings['data_dir']
    meta = read_meta(folder)
    split = 'val' if 'val_data' in settings else 'train'    # older runs kept only the latter
    if settings.get(f'{split}_data', meta[split]) != meta[split]:
        raise UserError(f"{folder} is not the data that this model was trained on, but another in "
                        "its place: name the data, or a text, if the program takes one")
    return folder


def exam_of_run(settings, count=KEPT):
    """
    What to ask a model of a made task (engine/answers.py), of `settings` from load_model; None of
    another text's. More problems than a run keeps, and those of older runs, are in its data.
    """
    if 'exam' in settings and (settings['exam'] is None or count <= KEPT):
        return settings['exam']
    return exam_of_data(data_dir_of(settings), count)


def exam_for_prompt(settings):
    """The same for a prompt; None, with a warning, where an older run's data is gone."""
    try:
        return exam_of_run(settings) if 'data_dir' in settings else None    # hf:FOLDER has none
    except UserError as error:
        print(f"warning: read as a text, not behind solved problems: {error}", file=sys.stderr)
        return None
