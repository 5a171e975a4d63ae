"""
The model that a run starts from: new, of the run's own checkpoint, or with the weights of another
folder; and what may differ from them.

    state = checkpoint_of(settings, GPTConfig)      what is to go on, or to be evaluated
    start = find_start(settings, asked, meta, GPTConfig, state)
    model = GPT(build(GPTConfig, start.config))
    start.load_into(model)
    check_model(model.config, asked, meta, settings.data_dir)

`settings` are train.py's, `asked` the user's settings of the model. A dry run, which has no data
and loads no weights, takes `planned_config`.
"""

import math
import os
import sys
from dataclasses import dataclass, fields
from typing import Optional

import torch

from engine.checkpoint import change_steps, load_checkpoint, load_weights
from engine.checks import check_types
from engine.errors import UserError
from engine.huggingface import read_description
from engine.shards import knows_tokens, read_meta
from engine.tasks import check_context

# settings of the model that may differ from the checkpoint's on any start
FREE = ('ponder_steps', 'jacobi_iters', 'dropout', 'halt_tau', 'halt_lambda', 'halt_start',
        'halt_full', 'halt_share', 'halt_beta')
# those that a new run from its weights may change
START = (*FREE, 'block_size', 'rope_theta', 'depth_attn', 'depth_stride', 'depth_mode', 'ponder',
         'ponder_topk', 'halting')


@dataclass
class Start:
    """Where a run starts: the config of its model, its weights, and the step it is at."""
    config: dict                        # of GPTConfig's fields; the others have their defaults
    step: int = 0
    weights: Optional[dict] = None      # None: from scratch
    new: bool = True                    # a run of its own: a mechanism's own weights may be new
    ponder_steps: Optional[int] = None  # to evaluate: other than the weights were trained with
    variant: Optional[dict] = None      # what else the model has: engine/variant.py

    def load_into(self, model):
        """Put the weights into the model made from `config`; UserError if they do not fit."""
        if self.weights is None:
            return
        weights = self.weights
        if self.new:
            weights = {**own_weights(model), **weights}
        load_weights(model, {'model': weights, 'variant': self.variant})
        if self.ponder_steps not in (None, model.config.ponder_steps):
            change_steps(model, self.ponder_steps)


def own_weights(model):
    """{name: weight} of the model's mechanism."""
    weights = model.state_dict()
    return {name: weights[name] for name in weights if name.startswith('mechanism.')}


# ---- a run ---------------------------------------------------------------------------------------

def checkpoint_of(settings, GPTConfig):
    """The checkpoint that the run goes on from, or evaluates; None where there is none of ours."""
    start = settings.init_from
    if start == 'resume':
        return load_checkpoint(settings.out_dir, GPTConfig)
    if settings.eval_only and start != 'scratch' and not start.startswith('hf:'):
        return load_checkpoint(start, GPTConfig)
    return None


def settings_of(state, Settings):
    """
    All settings of the run that left a checkpoint; names those that are not known here, and those
    that it lacks. UserError for a value of another type. Settings: train.py's class.
    """
    saved = state['settings']
    known = {field.name: field.default for field in fields(Settings)}
    gone = saved.keys() - known
    if gone:
        print(f"warning: no longer settings: {', '.join(sorted(gone))}", file=sys.stderr)
    missing = known.keys() - saved
    if missing:
        print(f"warning: not in the checkpoint, so at their defaults unless set: "
              f"{', '.join(sorted(missing))}", file=sys.stderr)
    try:
        check_types(Settings, saved)
    except ValueError as error:
        raise UserError(f"the checkpoint's settings are damaged: {error}") from None
    return {**known, **saved}


def find_start(settings, asked, meta, GPTConfig, state=None):
    """
    The Start that settings.init_from says. meta: the data's description. state: the checkpoint to
    go on from, if it is read already.
    """
    if settings.init_from == 'scratch':
        if settings.eval_only:
            raise UserError("eval_only needs a trained model: add --init_from=resume or "
                            "--init_from=FOLDER")
        return Start({**vocabulary_of(meta['n_tokens']), **asked})

    state = state or load_checkpoint(settings.init_from, GPTConfig)
    new = settings.init_from != 'resume' and not settings.eval_only
    changed = {}
    for name in START if new else FREE:
        # None is the default again in a new run; otherwise it changes nothing
        if name in asked and (new or asked[name] is not None):
            changed[name] = asked[name]
    # the model is made with the steps of its weights, and takes others when they are in it
    steps = changed.pop('ponder_steps', None) if settings.eval_only else None
    step = 0 if new else state['step']
    return Start({**state['config'], **changed}, step, state['model'], new, steps,
                 state.get('variant'))


def vocabulary_of(n_tokens):
    """{setting: value}: a table of so many tokens, with rows to the next multiple of 64."""
    return dict(n_tokens=n_tokens, vocab_size=math.ceil(n_tokens / 64) * 64)


def check_model(config, asked, meta, data_dir):
    """UserError if the model is not what the user asked for, or does not know the data's tokens."""
    for name, value in asked.items():
        has = getattr(config, name)
        if value is not None and has != value:
            raise UserError(f"{name}={value}, but the model loaded has {has}: leave the setting "
                            "out")
    if not knows_tokens(config.n_tokens, meta['tokenizer'], meta['n_tokens']):
        raise UserError(f"{data_dir} is tokenised with {meta['n_tokens']} tokens "
                        f"({meta['tokenizer']}), the model has n_tokens={config.n_tokens}: use the "
                        "data the model was made for")
    check_context(meta, config.block_size)


def idle_settings(model, asked):
    """Names of the user's settings that do nothing, because the mechanism they belong to is off."""
    config, read = model.config, model.mechanism.settings
    on = {  # beginning of a name: whether settings of such names do something
        'depth_': config.depth_attn,
        'halt_': config.halting != 'none',
        'ponder_steps': 'ponder_steps' in read,
        'ponder_topk': 'ponder_topk' in read,
        'jacobi_iters': 'jacobi_iters' in read,
    }
    off = tuple(name for name, used in on.items() if not used)
    default = type(config)
    idle = []
    for name, value in asked.items():
        if name.startswith(off) and value not in (None, getattr(default, name)):
            idle.append(name)
    return idle


def check_resume(state, step, meta, settings, ranks, device):
    """
    UserError if ranks are to go on from different steps, or from weights alone; a warning if the
    data is not that of the checkpoint `state`.
    """
    if not state['optimizer']:
        raise UserError(f"{settings.out_dir} holds weights and no optimizer state: start a new run "
                        f"from them with --init_from={settings.out_dir} and another --out_dir")
    if ranks.world > 1:
        mean = ranks.mean(torch.tensor([float(step)], dtype=torch.float64, device=device))
        if mean != step:
            raise UserError(f"this rank found step {step} in {settings.out_dir}, other ranks "
                            "another: give them all the same folder")
    if state.get('train_data', meta['train']) != meta['train'] and ranks.rank == 0:
        print(f"warning: the training data in {settings.data_dir} is not what this run read before",
              file=sys.stderr)


# ---- a dry run -----------------------------------------------------------------------------------

def planned_config(settings, given, GPTConfig, builtin, state=None):
    """
    ({setting: value} of the model that a run would have, and in words where its vocabulary is known
    from). given: the user's settings. builtin: folders of data sets that train.py makes, which need
    not be there. state: the checkpoint to go on from, if it is read already.
    """
    old = config_of(settings.init_from, GPTConfig, state)
    values = dict(old)
    for name, value in given.items():
        # the shape of a model that is loaded stays, also where a config file says None
        if value is not None or name in START or not old:
            values[name] = value
    known, where = planned_vocabulary(settings.data_dir, values, builtin)
    return {**values, **known}, where


def config_of(init_from, GPTConfig, state):
    """The config of the model that a run starts from; {} if it starts from scratch."""
    if init_from == 'scratch':
        return {}
    if init_from.startswith('hf:'):
        return read_description(init_from[3:], GPTConfig).config
    state = state or load_checkpoint(init_from, GPTConfig)
    return state['config']


def planned_variant(init_from, GPTConfig, state):
    """What the model that a run starts from has besides its config: engine/variant.py."""
    if init_from == 'scratch':
        return None
    if init_from.startswith('hf:'):
        return read_description(init_from[3:], GPTConfig).variant
    state = state or load_checkpoint(init_from, GPTConfig)
    return state.get('variant')


def planned_vocabulary(data_dir, values, builtin):
    """({setting: value} of the vocabulary a run would have, and where that is known from)."""
    if 'vocab_size' in values or 'n_tokens' in values:
        return {}, 'as set'
    if os.path.exists(os.path.join(data_dir, 'meta.json')):
        return vocabulary_of(read_meta(data_dir)['n_tokens']), f'of {data_dir}'
    if data_dir in builtin:
        return vocabulary_of(257), f'of {data_dir}'
    return {}, f'{data_dir} is not there: the default'
