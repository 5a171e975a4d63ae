"""
Hugging Face folders: Llama, Qwen3 and GPT-NeoX decoders, and the authors' PonderLM, PonderLM-2 and
Depth-Attention models, which are these with more keys in config.json.

    state = load_released(folder)                config and weights, as a checkpoint's
    config = describe(folder)                    its config alone
    ours = rename_from_hf(theirs, config)        Llama's and Qwen3's weights: their names -> ours
    theirs = rename_to_hf(ours, config)          and back

What config.json says is read in engine/hf_config.py. The layouts hold the same numbers. Here
queries, keys and values are one matrix, and so are the MLP's gate and up.
"""

import json
import os

import torch

from engine.files import UserError
from engine import hf_config
from engine.tensors import open_tensors
from engine.variant import Variant, config_of, rows_of_attention

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
    return names(config)


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


# ---- folders -------------------------------------------------------------------------------------

def read_json(folder):
    """The dictionary of a folder's config.json; UserError if there is none."""
    path = os.path.join(folder, 'config.json')
    try:
        with open(path, encoding='utf-8') as f:
            config = json.load(f)
        if type(config) is not dict:
            raise ValueError("config.json is no object")
        return config
    except (OSError, ValueError, RecursionError) as error:  # missing; no JSON; nested without end
        raise UserError(f"{folder}: not a readable Hugging Face folder ({error})") from None


def describe(folder):
    """
    {setting: value} of the model in a Hugging Face folder, its variant too; UserError if there is
    none, or it is not supported.
    """
    path = os.path.join(folder, 'config.json')
    described = hf_config.describe(read_json(folder), path)
    config = {**described.config, 'variant': described.variant}
    try:
        config_of(config)
    except ValueError as error:         # numbers that do not fit together
        raise UserError(f"{path}: not a usable configuration ({error})") from None
    return config


def load_released(folder, dtype=torch.float32):
    """
    A Hugging Face folder as `load_checkpoint` gives a checkpoint: a dict of config, model (weights
    of `dtype`), step, settings, tokenizer, optimizer. UserError if the folder is missing, damaged
    or not supported.
    """
    config = describe(folder)
    variant = Variant(**(config['variant'] or {}))
    weights = read_weights(folder, config_of(config), variant, dtype)
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise UserError(f"{folder}: {name} is not finite")
    return dict(config=config, model=weights, step=0, settings={}, tokenizer=f'hf:{folder}',
                optimizer={})


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
