"""
What a Hugging Face config.json says, in our words: Llama, Qwen3 and GPT-NeoX, and the authors'
PonderLM, PonderLM-2 and Depth-Attention models, which are these with more keys.

    described = describe(c, where)      .config: GPTConfig's fields; .variant: Variant's, or None

What is not supported is an error that names the key.
"""

import math
from dataclasses import asdict, dataclass
from typing import Optional

from engine.files import UserError
from engine.variant import rope_theta
from engine.variant import Variant

# ---- values --------------------------------------------------------------------------------------
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


# ---- what is not supported -----------------------------------------------------------------------

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
    refuse_pondering(c)
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


def refuse_pondering(c):
    """Of PonderLM's keys, what contradicts another."""
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


# ---- GPTConfig's fields and the variant ----------------------------------------------------------

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
