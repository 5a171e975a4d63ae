"""
The model that a run starts from: new, of the run's own checkpoint, or with the weights of another
folder; and what may differ from them. `settings` are train.py's, `given` what the user set, of
these and of the model, `asked` those of it that are the model's, `state` a checkpoint.

A run starts in one of three ways, which is_new and goes_on tell apart:

    new         at step 0, --init_from=scratch or with the weights of a FOLDER or hf:FOLDER
    goes on     --init_from=resume, with weights, moments and step of its out_dir
    evaluates   --eval_only, with the weights of its out_dir, a FOLDER or hf:FOLDER
"""

import hashlib
import json
import math
import os
import sys
from dataclasses import asdict, fields

import torch

from engine.build import config_of, new_model, without_numbers
from engine.checkpoint import CHECKPOINTS, change_steps, load_checkpoint, load_weights
from engine.files import UserError, check_whole, same_folder, stamp, typed
from engine.mechanisms import SETTINGS, halts
from engine.released import describe
from engine.shards import knows_tokens, one_tokenizer
from engine.tasks import check_room, task_of
from model import HALTING, GPTConfig, Loop

# Settings of a model that has weights already are of three kinds. Any start may change these:
FREE = ('ponder_steps', 'jacobi_iters', 'dropout', 'halt_tau', 'halt_lambda', 'halt_start',
        'halt_full', 'halt_share', 'halt_beta')
# none may change these; and all others only a new run may
FIXED = ('vocab_size', 'n_tokens', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'head_dim',
         'mlp_hidden', 'norm_eps', 'qk_norm', 'tie_embeddings', 'embed_scale', 'init_std')


def start_model(settings, given, meta, state, ranks, device):
    """
    (the model that the run starts from, the step it is at). meta: the data's description. state:
    what checkpoint_of read; the weights of other folders are read here. UserError if model,
    settings, data and machine do not fit together.
    """
    asked = asked_of_model(given)
    if state is None and settings.init_from != 'scratch':
        state = load_checkpoint(settings.init_from)
    config = start_config(settings, asked, meta['n_tokens'], state and state['config'])
    check_memory(config, settings, ranks, device)
    torch.manual_seed(settings.seed)
    model = new_model(config)
    if state is not None:
        take_weights(model, state, settings, asked, ranks)

    check_asked(model.config, asked)
    check_data(model.config, meta, state, settings)
    if goes_on(settings):
        check_resume(state, settings, ranks, device)
    if ranks.rank == 0:
        say_data(meta, state, settings)
        if goes_on(settings):
            say_counts(state, settings, model.config)
            say_changes(state, given, model.config)
            say_unsaved(state, given, settings.out_dir)
        idle = idle_settings(model, asked)
        if idle:
            print(f"warning: {', '.join(idle)}: without effect in this model",
                  file=sys.stderr)
    return model, 0 if is_new(settings) else state['step']


def is_new(settings):
    """Whether the run is one of its own, and does not go on or evaluate."""
    return settings.init_from != 'resume' and not settings.eval_only


def goes_on(settings):
    """Whether the run goes on from its own checkpoint."""
    return settings.init_from == 'resume' and not settings.eval_only


def asked_of_model(given):
    """Those of the user's settings that are the model's."""
    names = {field.name for field in fields(GPTConfig)}
    return {name: value for name, value in given.items() if name in names}


# ---- its config ----------------------------------------------------------------------------------

def start_config(settings, asked, n_tokens, old):
    """
    The config of a run's model. n_tokens: of its data (None: not known). old: {setting: value} of
    the checkpoint's, or None.
    """
    try:
        if old is None:
            vocabulary = vocabulary_of(n_tokens) if n_tokens else {}
            return GPTConfig(**{**vocabulary, **asked})
        allowed = {*asked} - {*FIXED} if is_new(settings) else {*FREE}
        if settings.eval_only:  # take_weights changes the steps, once the model has its weights
            allowed.remove('ponder_steps')
        # --name=None asks for the default
        changed = {name: value for name, value in asked.items() if name in allowed}
        rule = changed.get('halting')
        if rule in HALTING and rule != old.get('halting'):
            # the defaults of this rule, not what the other one had
            changed = {'halt_tau': None, **HALTING[rule].defaults, **changed}
        return config_of({**old, **changed})
    except ValueError as error:
        raise UserError(str(error)) from None


def vocabulary_of(n_tokens):
    """{setting: value}: a table of so many tokens, with rows to the next multiple of 64."""
    return dict(n_tokens=n_tokens, vocab_size=math.ceil(n_tokens / 64) * 64)


def old_config(init_from, state):
    """The config of the model that a run starts from, without its weights; None from scratch."""
    if init_from == 'scratch':
        return None
    if init_from.startswith('hf:'):
        return describe(init_from.removeprefix('hf:'))
    return (state or load_checkpoint(init_from))['config']


# ---- its weights ---------------------------------------------------------------------------------

def take_weights(model, state, settings, asked, ranks):
    """Put a checkpoint's weights into the model. An evaluation may ask for other steps then."""
    weights = state['model']
    if is_new(settings):
        weights, left, new = weights_to_begin_with(model, state)
        if ranks.rank == 0:
            without = f", without {', '.join(left)}" if left else ''
            beside = f", and new {', '.join(new)}" if new else ''
            print(f"begins with the weights of {settings.init_from}{without}{beside}", flush=True)
    load_weights(model, weights)
    check_whole(state['files'])
    steps = asked.get('ponder_steps')
    if settings.eval_only and steps not in (None, model.config.ponder_steps):
        change_steps(model, steps)


def weights_to_begin_with(model, state):
    """
    ({name: weight} for a new model, of a checkpoint; what stays behind, as ['mechanism.router'];
    what is new). The weights of another mechanism or rule stay behind, and the model's own are new.
    """
    def of_mechanism(name):
        return name.startswith('mechanism.')

    def modules(names):
        return sorted({'.'.join(name.split('.')[:2]) for name in names})
    same = all(state['config'].get(name, 'none') == getattr(model.config, name)
               for name in ('ponder', 'halting'))
    own = {name: weight for name, weight in model.state_dict().items() if of_mechanism(name)}
    taken = {name: weight for name, weight in state['model'].items()
             if same or not of_mechanism(name)}
    left, new = state['model'].keys() - taken.keys(), own.keys() - taken.keys()
    return {**own, **taken}, modules(left), modules(new)


# ---- what must fit together ----------------------------------------------------------------------

def check_memory(config, settings, ranks, device):
    """
    UserError if weights, gradients and moments take more memory than there is: Linux would kill the
    program without a word. On a GPU, PyTorch says so itself.
    """
    if device.type != 'cpu' or not os.path.exists('/proc/meminfo'):
        return
    model = without_numbers(config)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = 1 if settings.optimizer == 'muon' else 2      # at least: AdamW does Muon's rest
    if settings.shard_optimizer:
        moments /= ranks.world
    kept = model.num_params() + (0 if settings.eval_only else (1 + moments) * trained)
    on_this_machine = int(os.environ.get('LOCAL_WORLD_SIZE', ranks.world))     # torchrun sets it
    needs = on_this_machine * 4 * kept
    with open('/proc/meminfo', encoding='ascii') as f:
        kilobytes = dict(line.split(':') for line in f)['MemAvailable'].split()[0]
    has = 1024 * int(kilobytes)
    if needs > has:
        raise UserError(f"this model takes {needs / 1e9:.1f} GB of memory and more, and "
                        f"{has / 1e9:.1f} GB are free: take a smaller one (config/size/tiny.py), "
                        "or a GPU")


def check_asked(config, asked):
    """UserError if the model is not what the user asked for."""
    for name, value in asked.items():
        has = getattr(config, name)
        if value is not None and has != value:
            raise UserError(f"{name}={value}, but the model loaded has {has}: leave the setting "
                            "out")


def check_data(config, meta, state, settings):
    """
    UserError if the model was made for other tokens than the data has, or if a made task's problems
    are longer than its context.
    """
    folder, name, n_tokens = settings.data_dir, meta['tokenizer'], meta['n_tokens']
    known = knows_tokens(config.n_tokens, name, n_tokens)
    if state is None and not known:
        needs = ' '.join(f'--{n}={value}' for n, value in vocabulary_of(n_tokens).items())
        raise UserError(f"n_tokens={config.n_tokens}, but {folder} is tokenised with {n_tokens} "
                        f"tokens ({name}): add {needs}")
    if state is not None and not (known and one_tokenizer(state, meta)):
        raise UserError(f"{folder} is tokenised with {n_tokens} tokens ({name}), the model has "
                        f"n_tokens={config.n_tokens} ({state['tokenizer']}): use the data the "
                        "model was made for")
    if task_of(meta):
        check_room(*task_of(meta), config.block_size)


def check_resume(state, settings, ranks, device):
    """
    UserError if ranks are to go on from different steps, from weights alone or with another
    optimizer.
    """
    if not state['optimizer']:
        option = typed(f'--init_from={settings.out_dir}')
        raise UserError(f"{settings.out_dir} holds weights and no optimizer state: start a new run "
                        f"from them with {option} and another --out_dir")
    was = state['settings']['optimizer']
    if settings.optimizer != was:
        raise UserError(f"optimizer={settings.optimizer}: this run's moments are those of {was}; "
                        "leave the setting out, or start a new run from its weights with "
                        f"{typed(f'--init_from={settings.out_dir}')} and another --out_dir")
    if ranks.world > 1:
        step = state['step']
        mean = ranks.mean(torch.tensor([float(step)], dtype=torch.float64, device=device))
        if mean != step:
            raise UserError(f"this rank found step {step} in {settings.out_dir}, other ranks "
                            "another: give them all the same folder")


def check_ranks(settings, given, meta, ranks, device):
    """
    UserError for ranks of other settings or data, as on machines with a copy each: gradients are
    averaged, so every rank would be another model, and the loss that of none.
    """
    if ranks.world == 1:
        return
    same = {name: value for name, value in {**asdict(settings), **given}.items()
            if name not in ('out_dir', 'data_dir', 'threads', 'device')}
    text = json.dumps([same, meta['train'], meta['val']], sort_keys=True, default=str)
    mine = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
    if ranks.mean(torch.tensor([float(mine)], dtype=torch.float64, device=device)) != mine:
        raise UserError("the ranks have other settings or other data: give all machines the same "
                        "command and config files, and copies of one data folder")


# ---- what the user is told -----------------------------------------------------------------------

def say_data(meta, state, settings):
    """
    A warning if a run goes on with other data than before, or if other data lies now in the place
    of what the weights were trained on.
    """
    if state is None:
        return
    if goes_on(settings) or is_own_data(settings.data_dir, state['settings']):
        splits = ('val',) if settings.eval_only else ('train', 'val')
        say_other_data(settings.data_dir, meta, state, splits)


def is_own_data(folder, kept):
    """Whether a folder is called as the data_dir that a checkpoint kept (hf: folders, none)."""
    here, there = (os.path.realpath(path) for path in (folder, kept.get('data_dir', os.sep)))
    return os.path.basename(here) == os.path.basename(there)


def say_other_data(folder, meta, kept, splits=('train', 'val')):
    """A warning for each of these splits that is not what a checkpoint kept of its data."""
    told = {
        'train': ('training data', "training starts anew on it, and may read a text again"),
        'val': ('validation set', "cut anew, it may hold what the model was trained on"),
    }
    for split in splits:
        words, so = told[split]
        if kept.get(f'{split}_data', meta[split]) != meta[split]:
            print(f"warning: the {words} in {folder} is not what this model read before: {so}",
                  file=sys.stderr)


def say_counts(state, settings, config):
    """Warnings of what a run that goes on counts as if it had been so from its first step on."""
    was = state['settings']['batch_tokens']
    if was != settings.batch_tokens:
        print(f"warning: batch_tokens was {was}: the data goes on, and tokens are counted, as if "
              "all steps had been of today's size", file=sys.stderr)
    was = state['config'].get('ponder_steps', config.ponder_steps)
    if was != config.ponder_steps:
        print(f"warning: ponder_steps was {was}: log.jsonl counts FLOPs as if all steps had cost "
              "what they cost now", file=sys.stderr)


def say_changes(state, given, config):
    """
    One line with what the user's settings change in a run that goes on: given for a test, they
    would stay. (Of batch_tokens say_counts tells.)
    """
    before = {**state['config'], **state['settings']}
    told = []
    for name, value in given.items():
        stays = name in before and name not in ('out_dir', 'init_from', 'max_seconds',
                                                'batch_tokens')
        if value is None and name in state['config']:
            value = getattr(config, name)   # what None stands for
        respelled = name == 'data_dir' and same_folder(value, before[name])
        if stays and before[name] != value and not respelled:
            told.append(f"{name}={value} (was {before[name]})")
    if told:
        print(f"from here on with {', '.join(told)}")


def say_unsaved(state, given, folder):
    """
    A warning of what settings.json says and the checkpoint, whose settings a run goes on with, does
    not: somebody edited it, or a run with other settings ended before it saved.
    """
    before = {**state['config'], **state['settings']}
    try:
        with open(os.path.join(folder, 'settings.json'), encoding='utf-8') as f:
            filed = json.load(f)
    except (OSError, ValueError):
        return
    lost = [f'--{name}={value}' for name, value in filed.items()
            if name in before and before[name] != value and name not in given
            and name not in ('out_dir', 'init_from')]
    if lost:
        print(f"warning: {folder}/settings.json says {typed(*lost)}, but the last checkpoint was "
              "saved without it, and the run goes on without: give it again if it is to hold",
              file=sys.stderr)


def idle_settings(model, asked):
    """Names of the user's settings that do nothing, because the mechanism they belong to is off."""
    config, mechanism = model.config, model.mechanism
    used = {config.ponder, config.halting if halts(model) else None}
    # a model of one layer mixes nothing, unless it is a loop, whose earlier passes are sources, too
    several = config.n_layer > 1 or (type(mechanism) is Loop and mechanism.K > 0)
    idle = []
    for name, value in asked.items():
        if value in (None, getattr(GPTConfig, name)):
            continue
        off = name.startswith('depth_') and not (config.depth_attn and several)
        for beginning, mechanisms in SETTINGS.items():
            off = off or (name.startswith(beginning) and not used & {*mechanisms})
        if off:
            idle.append(name)
    return idle


# ---- what is in the folders ----------------------------------------------------------------------

def check_out_dir(settings, stamps):
    """
    UserError if this run would write over a checkpoint that it did not read, or that was written
    since. stamps: {path: stamp} of what it goes on from. Asked twice: before ranks wait for each
    other, and when the folder is locked (Log.open).
    """
    folder = settings.out_dir
    if any(stamp(path) != before for path, before in stamps.items()):
        raise UserError(f"{folder}: another run went on from the same checkpoint meanwhile; give "
                        "the same command again to go on from its own")
    if is_new(settings) and any(os.path.exists(os.path.join(folder, name)) for name in CHECKPOINTS):
        raise UserError(f"{folder} holds a checkpoint: go on with --init_from=resume, or choose "
                        "another --out_dir")


def checkpoint_of(settings):
    """
    The checkpoint that the run goes on from, or evaluates, and the settings of the run that left
    it, but for its folder, which may have moved, and its time limit; (None, {}) where there is none
    of ours, and for a new run.
    """
    if settings.init_from == 'resume':
        folder = settings.out_dir
    elif settings.eval_only and not settings.init_from.startswith('hf:'):
        folder = settings.init_from
    else:
        return None, {}
    state = load_checkpoint(folder)
    state['settings'].setdefault('optimizer', 'adamw')  # the only one that there was
    gone = sorted(state['settings'].keys() - {field.name for field in fields(settings)})
    if gone:
        print(f"warning: no longer settings: {', '.join(gone)}", file=sys.stderr)
    here = {'out_dir': settings.out_dir, 'max_seconds': settings.max_seconds}
    return state, {**state['settings'], **here}
