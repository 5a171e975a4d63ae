"""
Hugging Face folders: Llama, Qwen3 and GPT-NeoX decoders, and the authors' PonderLM, PonderLM-2 and
Depth-Attention models, which are these with more keys in config.json.

    state = load_state(folder)                   config, variant and weights, as a checkpoint's
    described = read_description(folder)         .config and .variant alone
    ours = rename_from_hf(theirs, config)        Llama's and Qwen3's weights: their names -> ours
    theirs = rename_to_hf(ours, config)          and back

The layouts hold the same numbers. Here queries, keys and values are one matrix, and so are the
MLP's gate and up.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Optional

import torch

from engine.errors import UserError
from engine.files import plain_file
from engine.neox import rope_theta, rows_of_attention
from engine.room import refuse_model
from engine.state import check_finite
from engine.tensors import open_tensors
from engine.variant import Variant

INSTALL = "writing Hugging Face folders needs safetensors: pip install safetensors"

# ---- names ---------------------------------------------------------------------------------------
# Ours inside h.N. : theirs inside the layer. Several of theirs make one of ours, stacked in this
# order.

LAYER = {
    'ln_1.weight': ['input_layernorm.weight'],
    'attn.c_attn.weight': ['self_attn.q_proj.weight',
                           'self_attn.k_proj.weight',
                           'self_attn.v_proj.weight'],
    'attn.q_norm.weight': ['self_attn.q_norm.weight'],
    'attn.k_norm.weight': ['self_attn.k_norm.weight'],
    'attn.c_proj.weight': ['self_attn.o_proj.weight'],
    'ln_2.weight': ['post_attention_layernorm.weight'],
    'mlp.c_fc.weight': ['mlp.gate_proj.weight', 'mlp.up_proj.weight'],
    'mlp.c_proj.weight': ['mlp.down_proj.weight'],
}
TOP = {
    'wte.weight': ['model.embed_tokens.weight'],
    'ln_f.weight': ['model.norm.weight'],
    'lm_head.weight': ['lm_head.weight'],
}

# GPT-NeoX: each of these has a weight and a bias
NEOX_LAYER = {
    'ln_1': 'input_layernorm',
    'attn.c_attn': 'attention.query_key_value',
    'attn.c_proj': 'attention.dense',
    'ln_2': 'post_attention_layernorm',
    'mlp.c_fc': 'mlp.dense_h_to_4h',
    'mlp.c_proj': 'mlp.dense_4h_to_h',
}
NEOX_TOP = {
    'wte.weight': ['gpt_neox.embed_in.weight'],
    'ln_f.weight': ['gpt_neox.final_layer_norm.weight'],
    'ln_f.bias': ['gpt_neox.final_layer_norm.bias'],
    'lm_head.weight': ['embed_out.weight'],
}

# tensors that stand in released files and that no computation reads
MEANINGLESS = ('adapter.weight', 'lm_head_layernorm.weight')
MEANINGLESS_ENDINGS = ('.attention.bias', '.attention.masked_bias', '.rotary_emb.inv_freq')


def names(config):
    """
    {our name: [their names]} for all tensors of a plain Llama or Qwen3. `config`, here and below,
    is a GPTConfig, or anything else with its fields as attributes.
    """
    table = dict(TOP)
    if config.tie_embeddings:
        table['lm_head.weight'] = table['wte.weight']
    for i in range(config.n_layer):
        for ours, theirs in LAYER.items():
            if '_norm' in ours and not config.qk_norm:
                continue
            table[f'h.{i}.{ours}'] = [f'model.layers.{i}.{name}' for name in theirs]
    return table


def names_of_variant(config, variant):
    """The same for a model of this Variant."""
    if variant.neox:
        return neox_names(config, variant)
    table = names(config)
    if not variant.late_k_norm:
        return table
    return {ours.replace('.k_norm.', '.k_norm_late.'): theirs for ours, theirs in table.items()}


def neox_names(config, variant):
    table = dict(NEOX_TOP)
    if config.tie_embeddings:
        table['lm_head.weight'] = table['wte.weight']
    for i in range(config.n_layer):
        for ours, theirs in NEOX_LAYER.items():
            table[f'h.{i}.{ours}.weight'] = [f'gpt_neox.layers.{i}.{theirs}.weight']
            if variant.attention_bias or not ours.startswith('attn.'):
                table[f'h.{i}.{ours}.bias'] = [f'gpt_neox.layers.{i}.{theirs}.bias']
    return table


def rename_from_hf(state_dict, config):
    """
    {Hugging Face name: tensor} -> {our name: tensor}. All other tensors belong to the mechanism.
    KeyError if a tensor is missing.
    """
    table = names(config)
    translated = {'lm_head.weight'}     # in some files also where it is the embedding
    for theirs in table.values():
        translated.update(theirs)

    out = {}
    for name, tensor in state_dict.items():
        if name not in translated and not is_meaningless(name):
            out[f'mechanism.{name}'] = tensor
    for ours, theirs in table.items():
        parts = [state_dict[name] for name in theirs]
        out[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out


def rename_to_hf(state_dict, config):
    """The inverse of `rename_from_hf`, for a plain model."""
    out = {}
    for ours, theirs in names(config).items():
        tensor = state_dict[ours]
        parts = tensor.split(rows_of_parts(ours, config) or len(tensor))
        for name, part in zip(theirs, parts):
            out[name] = part.contiguous()
    return out


def rows_of_parts(ours, config):
    """Of a tensor that is stacked here: the rows of each of theirs. None for the others."""
    inside = ours.split('.', 2)[-1]         # h.0.mlp.c_fc.weight -> mlp.c_fc.weight
    if inside == 'attn.c_attn.weight':
        q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        return [q, kv, kv]
    if inside == 'mlp.c_fc.weight':
        return [config.mlp_hidden, config.mlp_hidden]
    return None


def shape_of(ours, config, variant):
    """The shape of one of our weights or biases, of a model of this Variant."""
    C, V, H = config.n_embd, config.vocab_size, config.mlp_hidden
    q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    matrices = {
        'wte': (V, C),
        'lm_head': (V, C),
        'c_attn': (q + 2 * kv, C),
        'c_proj in attn': (C, q),
        'c_fc': (H if variant.neox else 2 * H, C),
        'c_proj in mlp': (C, H),
    }
    *_, where, module, kind = ('', *ours.split('.'))    # h.0.mlp.c_fc.bias: mlp, c_fc, bias
    shape = matrices.get(module) or matrices.get(f'{module} in {where}')
    if shape is None:                                   # a norm
        return (config.head_dim,) if where == 'attn' else (C,)
    return shape if kind == 'weight' else shape[:1]


def is_meaningless(name):
    return name in MEANINGLESS or name.endswith(MEANINGLESS_ENDINGS)


# ---- config.json: values -------------------------------------------------------------------------
# `c` is the dictionary of a config.json. Their errors become one line further down.

def whole_number(c, name, default=None, required=True):
    """c[name]; `default` if it is missing or null and not required."""
    if not required and c.get(name) is None:
        return default
    if type(c[name]) is not int:
        raise TypeError(f"{name}={c[name]!r} is no whole number")
    return c[name]


def number(c, name, default=None):
    """c[name] as a float; the default, where there is one, if it is missing or null."""
    if default is not None and c.get(name) is None:
        return default
    if type(c[name]) not in (int, float):
        raise TypeError(f"{name}={c[name]!r} is no number")
    return float(c[name])


def flag(c, name, default=False):
    """c[name]; `default` if it is missing or null."""
    value = c.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise TypeError(f"{name}={value!r} is neither true nor false")
    return value


def rope_settings(c):
    """What newer files say of rotary positions in one place: a dict."""
    return c.get('rope_parameters') or {}


# ---- config.json: what is not supported ----------------------------------------------------------

def refuse_unsupported(c):
    """UserError for the first thing in a config.json that our GPT has not; it names the key."""
    if c.get('model_type') not in FAMILIES:
        refuse(c, 'model_type', f"one of {', '.join(FAMILIES)} is needed")
    for key in ('quantization_config', 'compression_config'):
        if c.get(key):
            refuse(c, key, "only weights in floating point are read")
    for key in ('rope_scaling', 'rope_parameters'):
        if c.get(key) and not is_plain_rope(c[key]):
            refuse(c, key, "only rotary positions without scaling are supported")
    if c['model_type'] == 'gpt_neox':
        refuse_neox(c)
    else:
        refuse_llama(c)
    refuse_mechanisms(c)
    if flag(c, 'use_depth_attention'):
        refuse_depth(c)
    else:
        refuse_thoughts(c)


def is_plain_rope(settings):
    """Whether rotary positions are not scaled, and the same in all layers."""
    if type(settings) is not dict or any(type(value) is dict for value in settings.values()):
        return False
    return settings.get('rope_type', settings.get('type', 'default')) == 'default'


def refuse(c, key, why):
    value = ' '.join(f"{key}={c.get(key)!r}".split())
    raise UserError(f"{value[:80]} is not supported: {why}")


def refuse_llama(c):
    """What Llama and Qwen3 may have, and GPT has not."""
    for key in ('attention_bias', 'mlp_bias'):
        if flag(c, key):
            refuse(c, key, "Llama and Qwen3 are read without biases")
    if c.get('hidden_act', 'silu') != 'silu':
        refuse(c, 'hidden_act', "the MLP of Llama and Qwen3 has 'silu'")
    if flag(c, 'use_sliding_window'):
        refuse(c, 'use_sliding_window', "attention reads the whole context")
    if set(c.get('layer_types') or []) - {'full_attention'}:
        refuse(c, 'layer_types', "attention reads the whole context")
    for where in (c, rope_settings(c)):
        if number(where, 'partial_rotary_factor', 1.0) != 1:
            refuse(where, 'partial_rotary_factor', "Llama and Qwen3 turn all channels of a head")


def refuse_neox(c):
    if c.get('hidden_act', 'gelu') not in GELU:
        refuse(c, 'hidden_act', f"one of {', '.join(GELU)} is needed")
    n_head = whole_number(c, 'num_attention_heads')
    if whole_number(c, 'num_key_value_heads', n_head, required=False) != n_head:
        refuse(c, 'num_key_value_heads', "GPT-NeoX has as many as num_attention_heads")
    width = whole_number(c, 'hidden_size') // n_head
    if whole_number(c, 'head_dim', width, required=False) != width:
        refuse(c, 'head_dim', "in GPT-NeoX it is hidden_size / num_attention_heads")
    if flag(c, 'use_qk_norm'):
        refuse(c, 'use_qk_norm', "GPT-NeoX has no norms on queries and keys")


def refuse_mechanisms(c):
    """What the authors' files may ask for and their papers do not have, and what contradicts."""
    if flag(c, 'interpolation'):
        refuse(c, 'interpolation', "PonderLM-2 feeds back hidden states")
    for key in ('depth_attention_recent_window', 'depth_recent_window'):
        if whole_number(c, key, 0, required=False) > 0:
            refuse(c, key, "Depth-Attention reads every stride-th layer alone")
    for key in ('cross_layer_pattern', 'cross_layer_mode', 'layer_kv_reuse_map', 'baseline_mode'):
        if c.get(key):
            refuse(c, key, "it is an experiment of the authors' code that has no counterpart here")
    if number(c, 'softmax_temperature', 1.0) != 1:
        refuse(c, 'softmax_temperature', "PonderLM mixes embeddings at temperature 1")
    if flag(c, 'ponderinglm'):
        for key in ('recurrent_model', 'use_depth_attention'):
            if flag(c, key):
                refuse(c, key, "not together with ponderinglm")
        steps = whole_number(c, 'pondering_steps')
        if flag(c, 'mutiply_pondering_steps') and steps == 0:
            refuse(c, 'pondering_steps', "mutiply_pondering_steps would make the input 0")
    elif 'ponderinglm' not in c and whole_number(c, 'pondering_steps', 0, required=False) > 0:
        refuse(c, 'pondering_steps', "without ponderinglm: say true or false")


def refuse_depth(c):
    if c['model_type'] != 'llama':
        refuse(c, 'use_depth_attention', "only of model_type 'llama'")
    if not flag(c, 'recurrent_model', True):
        refuse(c, 'recurrent_model', "in the authors' code it turns use_depth_attention off: "
                                     "remove one of the two")
    if whole_number(c, 'num_latent_thoughts', 0, required=False) > 0:
        refuse(c, 'num_latent_thoughts', "not together with use_depth_attention")


def refuse_thoughts(c):
    thinks = flag(c, 'recurrent_model')
    if not thinks and whole_number(c, 'num_latent_thoughts', 0, required=False) > 0:
        refuse(c, 'num_latent_thoughts', "without recurrent_model=true")
    depth_code = c['model_type'] == 'llama' and 'use_depth_attention' in c
    if flag(c, 'scale_embeds') and not (thinks or flag(c, 'ponderinglm') or depth_code):
        refuse(c, 'scale_embeds', "without ponderinglm or recurrent_model")


# ---- config.json: GPTConfig's fields and the variant ---------------------------------------------

GELU = {'gelu': 'none', 'gelu_new': 'tanh', 'gelu_fast': 'tanh', 'gelu_pytorch_tanh': 'tanh'}


def llama_fields(c):
    theta = number(rope_settings(c), 'rope_theta', number(c, 'rope_theta', 1e4))
    return dict(
        vocab_size=whole_number(c, 'vocab_size'),
        block_size=whole_number(c, 'max_position_embeddings'),
        n_layer=whole_number(c, 'num_hidden_layers'),
        n_head=whole_number(c, 'num_attention_heads'),
        n_kv_head=whole_number(c, 'num_key_value_heads', required=False),
        n_embd=whole_number(c, 'hidden_size'),
        head_dim=whole_number(c, 'head_dim', required=False),
        mlp_hidden=whole_number(c, 'intermediate_size'),
        rope_theta=theta,
        norm_eps=number(c, 'rms_norm_eps'),
        qk_norm=has_qk_norm(c),
        tie_embeddings=flag(c, 'tie_word_embeddings'))


def has_qk_norm(c):
    """Qwen3 always; Llama in the code of Depth-Attention, where it is the default."""
    if c['model_type'] == 'qwen3':
        return True
    return flag(c, 'use_qk_norm', flag(c, 'use_depth_attention'))


def neox_fields(c):
    n_head = whole_number(c, 'num_attention_heads')
    head_dim = whole_number(c, 'hidden_size') // n_head
    theta = number(c, 'rotary_emb_base', number(c, 'rope_theta', 1e4))
    theta = number(rope_settings(c), 'rope_theta', theta)
    if theta <= 0:
        raise ValueError(f"rotary_emb_base={theta} must be positive")
    return dict(
        vocab_size=whole_number(c, 'vocab_size'),
        block_size=whole_number(c, 'max_position_embeddings', 2048, required=False),
        n_layer=whole_number(c, 'num_hidden_layers'),
        n_head=n_head,
        n_embd=whole_number(c, 'hidden_size'),
        mlp_hidden=whole_number(c, 'intermediate_size'),
        rope_theta=rope_theta(theta, head_dim, rotary_dim(c, head_dim)),
        norm_eps=number(c, 'layer_norm_eps', 1e-5),
        qk_norm=False,
        tie_embeddings=flag(c, 'tie_word_embeddings'))


def rotary_dim(c, head_dim):
    """How many channels of a head turn: rotary_pct of them, a quarter unless the file says more."""
    share = number(c, 'rotary_pct', number(c, 'partial_rotary_factor', 0.25))
    share = number(rope_settings(c), 'partial_rotary_factor', share)
    turning = int(head_dim * share)
    if not 0 < turning <= head_dim or turning % 2 != 0:
        raise ValueError(f"rotary_pct={share} turns {turning} of {head_dim} channels, which must "
                         "be an even number of them")
    return turning


def mechanism_fields(c):
    """Of the papers: which mechanism, its steps, and the scale of embeddings."""
    scaled = flag(c, 'scale_embeds')
    C = whole_number(c, 'hidden_size')
    if flag(c, 'use_depth_attention'):
        stride = whole_number(c, 'depth_attention_stride', 1, required=False)
        return dict(depth_attn=True, depth_stride=stride, embed_scale=scale(scaled, C))
    if flag(c, 'ponderinglm'):
        steps = whole_number(c, 'pondering_steps')
        return dict(ponder='embedding', ponder_steps=steps, embed_scale=scale(scaled, C))
    if flag(c, 'recurrent_model'):
        thoughts = whole_number(c, 'num_latent_thoughts')
        sweeps = whole_number(c, 'num_jacobi_iterations', 3, required=False)
        return dict(ponder='latent', ponder_steps=thoughts, jacobi_iters=sweeps,
                    embed_scale=scale(scaled, 2.5 * C))
    # 1 as these weights know it, whatever mechanism a run adds
    return dict(embed_scale=scale(scaled, C))


def scale(scaled, square):
    return math.sqrt(square) if scaled else 1.0


FAMILIES = {'llama': llama_fields, 'qwen3': llama_fields, 'gpt_neox': neox_fields}


@dataclass
class Description:
    """What a config.json says of a model."""
    config: dict                    # GPTConfig's fields
    variant: Optional[dict]         # Variant's fields: engine/variant.py; None for a GPT as it is


def describe(c, where):
    """
    The Description of the dictionary of a config.json. UserError for what our GPT has not, and for
    what is missing or no number. Whether the numbers fit together, GPTConfig says.
    """
    try:
        refuse_unsupported(c)
        config = {**FAMILIES[c['model_type']](c), **mechanism_fields(c)}
        variant = variant_of_config(c)
        return Description(config, None if variant == Variant() else asdict(variant))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where}: not a usable configuration of {c['model_type']} "
                        f"({error})") from None


def variant_of_config(c):
    """The Variant that a config.json describes."""
    variant = Variant()
    if flag(c, 'ponderinglm') and flag(c, 'mutiply_pondering_steps'):
        variant.input_factor = float(c['pondering_steps'])
    if c['model_type'] == 'gpt_neox':
        variant.neox = True
        variant.parallel_residual = flag(c, 'use_parallel_residual', True)
        variant.attention_bias = flag(c, 'attention_bias', True)
        variant.gelu = GELU[c.get('hidden_act', 'gelu')]
        variant.rotary_dim = rotary_dim(c, c['hidden_size'] // c['num_attention_heads'])
    elif c['model_type'] == 'llama' and has_qk_norm(c):
        variant.late_k_norm = True
    return variant


# ---- folders -------------------------------------------------------------------------------------

def read_json(folder):
    """The dictionary of a folder's config.json; UserError if there is none."""
    path = os.path.join(folder, 'config.json')
    try:
        with open(plain_file(path), encoding='utf-8') as f:
            config = json.load(f)
        if type(config) is not dict:
            raise ValueError("config.json is no object")
        return config
    except (OSError, ValueError, RecursionError) as error:  # missing; no JSON; nested without end
        raise UserError(f"{folder}: not a readable Hugging Face folder ({error})") from None


def read_description(folder, config_class=None):
    """
    The Description of a Hugging Face folder; UserError if there is none. config_class: refuse
    values that this class does not take.
    """
    path = os.path.join(folder, 'config.json')
    described = describe(read_json(folder), path)
    try:
        if config_class is not None:
            config_class(**described.config)
    except ValueError as error:         # numbers that do not fit together
        raise UserError(f"{path}: not a usable configuration ({error})") from None
    return described


def load_state(folder, config_class=None, dtype=torch.float32):
    """
    A Hugging Face folder as `load_checkpoint` gives a checkpoint: a dict of config, variant, model
    (weights of `dtype`), step, settings, tokenizer. UserError if the folder is missing, damaged or
    not supported, or if there is no room for the weights. config_class: as in `read_description`.
    """
    described = read_description(folder, config_class)
    if config_class is not None:
        config = config_class(**described.config)
        refuse_model(config, described.variant, torch.device('cpu'), dtype)
    variant = Variant(**(described.variant or {}))
    weights = read_weights(folder, config_like(described.config), variant, dtype)
    try:
        check_finite(weights)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from None
    return dict(config=described.config, variant=described.variant, model=weights, step=0,
                settings={}, tokenizer=f'hf:{folder}')


def config_like(fields):
    """The fields as attributes, with the defaults that depend on others."""
    config = SimpleNamespace(**{'n_kv_head': None, 'head_dim': None, **fields})
    config.n_kv_head = config.n_kv_head or config.n_head
    config.head_dim = config.head_dim or config.n_embd // config.n_head
    return config


def read_weights(folder, config, variant, dtype):
    """
    {our name: tensor} of a folder, read one at a time; UserError if one is missing, or there that
    nothing reads.
    """
    stored = open_tensors(folder)
    if config.n_layer > len(stored):    # before the table grows as long as that
        raise UserError(f"{folder}: config.json says {config.n_layer} layers, its files have "
                        f"{len(stored)} tensors")
    table = names_of_variant(config, variant)
    if config.tie_embeddings:
        table.pop('lm_head.weight')     # in some files it stands there, too
    refuse_unknown(folder, stored, table)

    places = {}                         # all are known to be there before any is read
    for ours, theirs in table.items():
        try:
            places[ours] = [stored[name] for name in theirs]
        except KeyError as error:
            raise UserError(f"{folder}: no tensor {error} in its files of weights") from None
        refuse_shapes(places[ours], ours, config, variant)

    weights = {}
    for ours, parts in places.items():
        weights[ours] = read_stacked(parts, shape_of(ours, config, variant), dtype)
        if variant.neox and '.c_attn.' in ours:
            order = rows_of_attention(config.n_head, config.head_dim, variant.rotary_dim)
            reorder(weights[ours], order)
    if config.tie_embeddings:
        weights['lm_head.weight'] = weights['wte.weight']
    return weights


def refuse_unknown(folder, stored, table):
    """UserError for a tensor that no name in the table asks for, unless it means nothing."""
    known = {TOP['lm_head.weight'][0], NEOX_TOP['lm_head.weight'][0]}
    for theirs in table.values():
        known.update(theirs)
    unknown = [name for name in stored if name not in known and not is_meaningless(name)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ''
        raise UserError(f"{folder}: unknown tensor '{unknown[0]}'{more}: this is another model "
                        "than its config.json says")


def refuse_shapes(parts, ours, config, variant):
    """UserError unless tensors in files, one under the other, are what config.json says."""
    rows, *columns = shape_of(ours, config, variant)
    rows_of_each = rows_of_parts(ours, config) if len(parts) > 1 else [rows]
    for part, rows in zip(parts, rows_of_each):
        if part.shape != (rows, *columns):
            raise UserError(f"{part.path}: {part.name} has shape {part.shape}, config.json says "
                            f"{(rows, *columns)}")


def read_stacked(parts, shape, dtype):
    """Tensors in files as one of this shape and `dtype`, one under the other."""
    out = torch.empty(shape, dtype=dtype)
    for part, place in zip(parts, out.split([part.shape[0] for part in parts])):
        part.copy_into(place)
    return out


def reorder(tensor, order):
    """Put the rows of a tensor into this order."""
    for columns in tensor.view(len(tensor), -1).split(64, dim=1):   # in parts: no whole copy
        columns.copy_(columns[order])
