"""
The model that a run starts from: new, of the run's own checkpoint, or with the weights of another
folder; and what may differ from them. `settings` are train.py's, `asked` the user's settings of the
model.
"""

import hashlib
import json
import math
import os
import sys
from dataclasses import asdict, fields

import torch

from configurator import read
from engine.checkpoint import CHECKPOINTS, change_steps, load_checkpoint, load_weights
from engine.build import new_model, without_numbers
from engine.files import UserError, check_whole, same_folder, stamp, typed
from engine.mechanisms import SETTINGS, halts
from engine.released import describe
from engine.shards import knows_tokens, one_tokenizer
from engine.tasks import check_room, task_of
from engine.variant import config_of
from model import HALTING, GPTConfig, Loop

# settings of the model that may differ from the checkpoint's on any start
FREE = ('ponder_steps', 'jacobi_iters', 'dropout', 'halt_tau', 'halt_lambda', 'halt_start',
        'halt_full', 'halt_share', 'halt_beta')
# those that not even a new run from its weights may change
FIXED = ('vocab_size', 'n_tokens', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'head_dim',
         'mlp_hidden', 'norm_eps', 'qk_norm', 'tie_embeddings', 'embed_scale', 'init_std')


def start_model(settings, given, meta, state, ranks, device):
    """
    (the model that the run starts from, the step it is at). given: the user's settings. meta: the
    data's description. state: the checkpoint to go on from, or None. UserError if model, settings,
    data and machine do not fit together.
    """
    asked = asked_of_model(given)
    if settings.init_from != 'scratch':
        state = state or load_checkpoint(settings.init_from, mapped=True)
    elif settings.eval_only:
        raise UserError("eval_only needs a trained model: add --init_from=resume or "
                        "--init_from=FOLDER")
    config = start_config(settings, asked, meta['n_tokens'], state and state['config'])
    check_memory(config, settings, ranks, device)
    torch.manual_seed(settings.seed)
    model = new_model(config)
    if state is not None:
        weights = state['model']
        if is_new(settings):
            weights, left = weights_to_begin_with(model, state)
            if ranks.rank == 0:
                without = f", without {', '.join(left)}" if left else ''
                print(f"begins with the weights of {settings.init_from}{without}", flush=True)
        load_weights(model, weights)
        check_whole(state['files'])
        steps = asked.get('ponder_steps')
        if settings.eval_only and steps not in (None, model.config.ponder_steps):
            change_steps(model, steps)
    check_asked(model.config, asked)
    check_data(model.config, meta, state, settings, ranks)
    step = 0 if is_new(settings) else state['step']
    if settings.init_from == 'resume' and not settings.eval_only:
        check_resume(state, step, settings, ranks, device)
        say_changes(state, given, model.config, ranks)
        say_unsaved(state, given, settings.out_dir, ranks)
    idle = idle_settings(model, asked)
    if idle and ranks.rank == 0:
        print(f"warning: {', '.join(idle)}: without effect, the mechanism is off", file=sys.stderr)
    return model, step


def weights_to_begin_with(model, state):
    """
    ({name: weight} for a new model, of a checkpoint; what stays behind, as ['mechanism.router']).
    The weights of another mechanism or rule stay behind, and the model's own are new.
    """
    def of_mechanism(name):
        return name.startswith('mechanism.')
    own = {name: weight for name, weight in model.state_dict().items() if of_mechanism(name)}
    had = [state['config'].get(name, 'none') for name in ('ponder', 'halting')]
    if had == [model.config.ponder, model.config.halting]:
        return {**own, **state['model']}, []
    kept = {name: weight for name, weight in state['model'].items() if not of_mechanism(name)}
    left = {'.'.join(name.split('.')[:2]) for name in state['model'] if of_mechanism(name)}
    return {**own, **kept}, sorted(left)


def asked_of_model(given):
    """Those of the user's settings that are the model's."""
    names = {field.name for field in fields(GPTConfig)}
    return {name: value for name, value in given.items() if name in names}


def is_new(settings):
    """Whether the run is one of its own, and does not go on or evaluate."""
    return settings.init_from != 'resume' and not settings.eval_only


def start_config(settings, asked, n_tokens, old):
    """
    The config of a run's model. n_tokens: of its data (None: not known). old: {setting: value} of
    the checkpoint's, or None.
    """
    try:
        if old is None:
            vocabulary = vocabulary_of(n_tokens) if n_tokens else {}
            return GPTConfig(**{**vocabulary, **asked})
        if is_new(settings):    # --name=None asks for the default
            changed = {name: asked[name] for name in asked if name not in FIXED}
            rule = asked.get('halting')
            if rule in HALTING and rule != old.get('halting'):
                # the defaults of this rule, not what the other one had
                changed = {'halt_tau': None, **HALTING[rule].defaults, **changed}
        else:
            changed = {name: asked[name] for name in FREE if name in asked}
        if settings.eval_only:  # the model has the steps of its weights, then takes others
            changed.pop('ponder_steps', None)
        return config_of({**old, **changed})
    except ValueError as error:
        raise UserError(str(error)) from None


def say_order(argv, given, settings):
    """
    Warnings of config files among the words of the command, argv, that take back what stands before
    them, or hold the numbers of another model.
    """
    blocks = type(settings), GPTConfig
    for i, path in enumerate(argv):
        if path.startswith('--'):
            continue
        filed, _ = read([path], '', *blocks)
        has_all = path.endswith('.json')    # a .py file may overrule another file, no --option
        before_it = [word for word in argv[:i] if has_all or word.startswith('--')]
        earlier, _ = read(before_it, '', *blocks)
        say_overruled(path, filed, earlier, given)
        if has_all:
            say_kept_numbers(path, filed, given, settings)


def say_overruled(path, filed, earlier, given):
    """
    A warning where a config file or settings.json (path, which sets what is `filed`) takes back
    what stands before it in the command. earlier: {name: value} of what it should not take back.
    """
    lost = [name for name in earlier if name in filed and earlier[name] != filed[name]
            and given[name] == filed[name]]
    if lost:
        print(f"warning: {path} stands behind what sets {', '.join(lost)}, and sets it anew: name "
              f"{path} first", file=sys.stderr)


def say_kept_numbers(path, filed, given, settings):
    """
    A warning where a run names a settings.json (path, which sets what is `filed`), but is of
    another mechanism, rule or shape. All numbers stand in that file, also those that follow from
    these, and the user may not have meant them.
    """
    same_kind = all(filed.get(name) == given.get(name)
                    for name in ('ponder', 'halting', 'n_layer', 'n_head', 'n_embd'))
    if same_kind:
        return
    asked = asked_of_model(given)
    names = {field.name for field in fields(GPTConfig) if field.default is None} - {'n_tokens'}
    if settings.init_from != 'scratch':
        names -= {*FIXED}       # which are those of the weights
    try:
        own = GPTConfig(**{name: asked[name] for name in asked if name not in names})
    except ValueError:          # start_config says it
        return
    kept = {name: getattr(own, name) for name in sorted(names)
            if asked.get(name) is not None and asked[name] == filed.get(name) != getattr(own, name)}
    if kept:
        numbers = ', '.join(f'{name}={asked[name]}' for name in kept)
        print(f"warning: {numbers}: as in {path}; for those of this model add "
              + ' '.join(f'--{name}={value}' for name, value in kept.items()), file=sys.stderr)


def vocabulary_of(n_tokens):
    """{setting: value}: a table of so many tokens, with rows to the next multiple of 64."""
    return dict(n_tokens=n_tokens, vocab_size=math.ceil(n_tokens / 64) * 64)


def old_config(init_from, state):
    """The config of the model that a run starts from, without its weights; None from scratch."""
    if init_from == 'scratch':
        return None
    if init_from.startswith('hf:'):
        return describe(init_from.removeprefix('hf:'))
    return (state or load_checkpoint(init_from, mapped=True))['config']


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


def check_data(config, meta, state, settings, ranks):
    """
    UserError if the model was made for other tokens than the data has; a warning if a run goes on
    with other data than that of the checkpoint `state`, or the data took the place of its own.
    """
    name = meta['tokenizer']
    of_model = state['tokenizer'] if state else name
    known = knows_tokens(config.n_tokens, name, meta['n_tokens'])
    if not known and not state:
        needs = ' '.join(f'--{n}={value}' for n, value in vocabulary_of(meta['n_tokens']).items())
        raise UserError(f"n_tokens={config.n_tokens}, but {settings.data_dir} is tokenised with "
                        f"{meta['n_tokens']} tokens ({name}): add {needs}")
    if not known or (state and not one_tokenizer(state, meta)):
        raise UserError(f"{settings.data_dir} is tokenised with {meta['n_tokens']} tokens "
                        f"({name}), the model has n_tokens={config.n_tokens} ({of_model}): use the "
                        "data the model was made for")
    if task_of(meta):
        check_room(*task_of(meta), config.block_size)
    if state is None or ranks.rank > 0:
        return
    goes_on = settings.init_from == 'resume' and not settings.eval_only
    if goes_on or is_own_data(settings.data_dir, state['settings']):
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


def idle_settings(model, asked):
    """Names of the user's settings that do nothing, because the mechanism they belong to is off."""
    config = model.config
    used = {config.ponder, config.halting if halts(model) else None}
    mechanism = model.mechanism     # one layer has no source, but in a loop's earlier passes
    several = config.n_layer > 1 or (type(mechanism) is Loop and mechanism.K > 0)
    idle = []
    for name, value in asked.items():
        if value in (None, getattr(GPTConfig, name)):
            continue
        if name.startswith('depth_') and not (config.depth_attn and several):
            idle.append(name)
        for beginning, mechanisms in SETTINGS.items():
            if name.startswith(beginning) and not used & set(mechanisms):
                idle.append(name)
                break
    return idle


def check_resume(state, step, settings, ranks, device):
    """
    UserError if ranks are to go on from different steps, from weights alone or with another
    optimizer; a warning of another batch_tokens.
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
        mean = ranks.mean(torch.tensor([float(step)], dtype=torch.float64, device=device))
        if mean != step:
            raise UserError(f"this rank found step {step} in {settings.out_dir}, other ranks "
                            "another: give them all the same folder")
    if ranks.rank > 0:
        return
    if state['settings']['batch_tokens'] != settings.batch_tokens:
        print(f"warning: batch_tokens was {state['settings']['batch_tokens']}: the data goes on, "
              "and tokens are counted, as if all steps had been of today's size", file=sys.stderr)


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


def say_changes(state, given, config, ranks):
    """
    One line with what the user's settings change in a run that goes on: given for a test, they
    would stay. (Of batch_tokens check_resume tells.)
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
    if told and ranks.rank == 0:
        print(f"from here on with {', '.join(told)}")


def say_unsaved(state, given, folder, ranks):
    """
    A warning of what settings.json says and the checkpoint, whose settings a run goes on with, does
    not: somebody edited it, or a run with other settings ended before it saved.
    """
    kept = {**state['config'], **state['settings']}
    try:
        with open(os.path.join(folder, 'settings.json'), encoding='utf-8') as f:
            filed = json.load(f)
    except (OSError, ValueError):
        return
    lost = [f'--{name}={value}' for name, value in filed.items()
            if name in kept and kept[name] != value and name not in given
            and name not in ('out_dir', 'init_from')]
    if lost and ranks.rank == 0:
        print(f"warning: {folder}/settings.json says {typed(*lost)}, but the last checkpoint was "
              "saved without it, and the run goes on without: give it again if it is to hold",
              file=sys.stderr)


# ---- what is in the folders, before ranks wait for each other ------------------------------------

def check_unused(settings, stamps=()):
    """
    UserError if this run would write over a checkpoint that it did not read, or that was written
    since. stamps: {path: stamp} of what it goes on from.
    """
    folder = settings.out_dir
    if any(stamp(path) != stamps[path] for path in stamps):
        raise UserError(f"{folder}: another run went on from the same checkpoint meanwhile; give "
                        "the same command again to go on from its own")
    if is_new(settings) and any(os.path.exists(os.path.join(folder, name)) for name in CHECKPOINTS):
        raise UserError(f"{folder} holds a checkpoint: go on with --init_from=resume, or choose "
                        "another --out_dir")


def checkpoint_of(settings):
    """
    The checkpoint that the run goes on from, or evaluates, and the settings of the run that left
    it, but for its folder, which may have moved, and its time limit; (None, {}) where there is none
    of ours.
    """
    folder = settings.init_from
    if folder == 'resume':
        folder = settings.out_dir
    elif not settings.eval_only or folder == 'scratch' or folder.startswith('hf:'):
        return None, {}
    state = load_checkpoint(folder, mapped=True)
    state['settings'].setdefault('optimizer', 'adamw')  # the only one that there was
    gone = sorted(state['settings'].keys() - {field.name for field in fields(settings)})
    if gone:
        print(f"warning: no longer settings: {', '.join(gone)}", file=sys.stderr)
    here = {'out_dir': settings.out_dir, 'max_seconds': settings.max_seconds}
    return state, {**state['settings'], **here}
