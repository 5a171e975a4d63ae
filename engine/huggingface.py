"""
Hugging Face folders: Llama and Qwen3 decoders, as config.json and .safetensors files.

    config = read_config(folder)                 GPTConfig's fields, as a dict
    state = load_state(folder)                   config and weights, as a checkpoint has them
    ours = rename_from_hf(theirs, config)        weights under their names -> under ours
    theirs = rename_to_hf(ours, config)          and back

The two layouts hold the same numbers. Here queries, keys and values are one matrix, and so are the
MLP's gate and up.
"""

import json
import os
from types import SimpleNamespace

import torch

from engine.errors import UserError
from engine.files import plain_file
from engine.state import check_finite

INSTALL = "reading and writing Hugging Face folders needs safetensors: pip install safetensors"

# Ours inside h.N. : theirs inside model.layers.N.
# Several of theirs make one of ours, stacked in this order.
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


# ---- weights -------------------------------------------------------------------------------------
# `config` is a GPTConfig, or anything else with its fields as attributes.

def names(config):
    """{our name: [their names]} for all tensors of a plain model."""
    table = dict(TOP)
    if config.tie_embeddings:
        table['lm_head.weight'] = table['wte.weight']
    for i in range(config.n_layer):
        for ours, theirs in LAYER.items():
            if '_norm' in ours and not config.qk_norm:
                continue
            table[f'h.{i}.{ours}'] = [f'model.layers.{i}.{name}' for name in theirs]
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
        computed_here = name.endswith('rotary_emb.inv_freq')    # old files have these frequencies
        if name not in translated and not computed_here:
            out[f'mechanism.{name}'] = tensor
    for ours, theirs in table.items():
        parts = [state_dict[name] for name in theirs]
        out[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out


def rename_to_hf(state_dict, config):
    """The inverse of `rename_from_hf`, for a plain model."""
    q = config.n_head * config.head_dim
    kv = config.n_kv_head * config.head_dim
    rows = {                            # what is stacked here: the rows of each of theirs
        'attn.c_attn.weight': [q, kv, kv],
        'mlp.c_fc.weight': [config.mlp_hidden, config.mlp_hidden],
    }
    out = {}
    for ours, theirs in names(config).items():
        tensor = state_dict[ours]
        inside = ours.split('.', 2)[-1]         # h.0.mlp.c_fc.weight -> mlp.c_fc.weight
        parts = tensor.split(rows.get(inside, len(tensor)))
        for name, part in zip(theirs, parts):
            out[name] = part.contiguous()
    return out


# ---- config.json ---------------------------------------------------------------------------------

def refuse_unsupported(c, where):
    """UserError for the first thing in the dictionary of a config.json that our GPT has not."""
    scaling = c.get('rope_scaling') or c.get('rope_parameters') or {}
    scaling = scaling.get('rope_type') or scaling.get('type', 'default')    # 'type': its older name
    found = {
        f"model_type {c.get('model_type')!r}": c.get('model_type') not in ('llama', 'qwen3'),
        "biases": c.get('attention_bias') or c.get('mlp_bias'),
        f"activation {c.get('hidden_act')!r}": c.get('hidden_act', 'silu') != 'silu',
        f"rope scaling {scaling!r}": scaling != 'default',
        "a sliding window": c.get('use_sliding_window'),
    }
    for what, is_there in found.items():
        if is_there:
            raise UserError(f"{where}: {what} is not supported; Llama and Qwen3 without biases "
                            "and rope scaling are")


def whole_number(c, name, required=True):
    """c[name], None if it is not required and missing; KeyError or TypeError if it is no number."""
    if not required and c.get(name) is None:
        return None
    if type(c[name]) is not int:
        raise TypeError(f"{name}={c[name]!r} is no whole number")
    return c[name]


def config_from_hf(c, where):
    """
    {field of GPTConfig: value} of the dictionary of a config.json. UserError for what our GPT has
    not, and for what is missing or no number. Whether the numbers fit together, GPTConfig says.
    """
    refuse_unsupported(c, where)
    rope = c.get('rope_parameters') or {}
    theta = c.get('rope_theta') or rope.get('rope_theta') or 1e4
    try:
        return dict(
            vocab_size=whole_number(c, 'vocab_size'),
            block_size=whole_number(c, 'max_position_embeddings'),
            n_layer=whole_number(c, 'num_hidden_layers'),
            n_head=whole_number(c, 'num_attention_heads'),
            n_kv_head=whole_number(c, 'num_key_value_heads', required=False),
            n_embd=whole_number(c, 'hidden_size'),
            head_dim=whole_number(c, 'head_dim', required=False),
            mlp_hidden=whole_number(c, 'intermediate_size'),
            rope_theta=float(theta),
            norm_eps=float(c['rms_norm_eps']),
            qk_norm=c['model_type'] == 'qwen3',
            tie_embeddings=c.get('tie_word_embeddings', False),
            embed_scale=1.0)            # as these weights know it, whatever mechanism a run adds
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not a usable Llama or Qwen3 configuration ({error})") from None


# ---- folders -------------------------------------------------------------------------------------

def read_config(folder, config_class=None):
    """
    {field of GPTConfig: value} of a Hugging Face folder; UserError if there is none.
    config_class: refuse values that this class does not take.
    """
    path = os.path.join(folder, 'config.json')
    try:
        with open(plain_file(path), encoding='utf-8') as f:
            config = json.load(f)
        config = config_from_hf(config, path)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        # missing, no JSON, JSON but no object, JSON nested without end
        raise UserError(f"{folder}: not a readable Hugging Face folder ({error})") from None
    try:
        if config_class is not None:
            config_class(**config)
    except ValueError as error:         # numbers that do not fit together
        raise UserError(f"{path}: not a usable Llama or Qwen3 configuration ({error})") from None
    return config


def load_state(folder, config_class=None):
    """
    A Hugging Face folder as `load_checkpoint` gives a checkpoint: a dict of config, model (weights
    in float32) and step. UserError if the folder is missing, damaged or not supported.
    config_class: as in `read_config`.
    """
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UserError(INSTALL) from None

    config = read_config(folder, config_class)
    theirs = {}
    try:
        for file in sorted(os.listdir(folder)):
            if file.endswith('.safetensors'):
                path = plain_file(os.path.join(folder, file))
                for name, tensor in load_file(path).items():
                    theirs[name] = tensor.float()
        ours = rename_from_hf(theirs, SimpleNamespace(**config))
        check_finite(ours)
    except KeyError as error:
        raise UserError(f"{folder}: no tensor {error} in its .safetensors files") from None
    except Exception as error:          # safetensors has error types of its own
        reason = ' '.join(str(error).split())[:120]
        raise UserError(f"{folder}: not a readable Hugging Face folder ({reason})") from None
    return dict(config=config, model=ours, step=0)
