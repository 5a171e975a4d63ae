"""
Hugging Face folders in and out: Llama and Qwen3 decoders, config.json and safetensors (pip install safetensors).

    python tools/hf.py out/vanilla exported/vanilla         write a checkpoint of a plain model as a Hugging Face folder
    python train.py --init_from=hf:FOLDER ...               start from such a folder

The two layouts hold the same numbers. Here queries, keys and values are one matrix, and so are the MLP's gate and up.
"""

import json
import os
import sys
from dataclasses import asdict

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # run from anywhere
from engine.checkpoint import load_weights, whole
from configurator import read
from engine.errors import UserError, run
from model import GPT, GPTConfig

INSTALL = "reading and writing Hugging Face folders needs safetensors: pip install safetensors"
# theirs inside model.layers.N. -> ours inside h.N.; several of theirs make one of ours, stacked in this order
LAYER = {
    'ln_1.weight': ['input_layernorm.weight'],
    'attn.c_attn.weight': ['self_attn.q_proj.weight', 'self_attn.k_proj.weight', 'self_attn.v_proj.weight'],
    'attn.q_norm.weight': ['self_attn.q_norm.weight'],
    'attn.k_norm.weight': ['self_attn.k_norm.weight'],
    'attn.c_proj.weight': ['self_attn.o_proj.weight'],
    'ln_2.weight': ['post_attention_layernorm.weight'],
    'mlp.c_fc.weight': ['mlp.gate_proj.weight', 'mlp.up_proj.weight'],
    'mlp.c_proj.weight': ['mlp.down_proj.weight'],
}
TOP = {'wte.weight': ['model.embed_tokens.weight'], 'ln_f.weight': ['model.norm.weight'], 'lm_head.weight': ['lm_head.weight']}


def names(config):
    """{our name: [their names]} for all tensors of a model."""
    table = dict(TOP)
    if config.tie_embeddings: table['lm_head.weight'] = table['wte.weight']
    for i in range(config.n_layer):
        table.update({f'h.{i}.{ours}': [f'model.layers.{i}.{name}' for name in theirs] for ours, theirs in LAYER.items()
                      if config.qk_norm or '_norm' not in ours})
    return table


def rename_from_hf(state_dict, config):
    """{Hugging Face name: tensor} -> {our name: tensor}. Other names, a mechanism's, stay; KeyError if one is missing."""
    table = names(config)
    used = {name for theirs in table.values() for name in theirs} | {'lm_head.weight'}
    out = {name: tensor for name, tensor in state_dict.items() if name not in used and not name.endswith('rotary_emb.inv_freq')}
    for ours, theirs in table.items():
        out[ours] = torch.cat([state_dict[name] for name in theirs]) if len(theirs) > 1 else state_dict[theirs[0]]
    return out


def rename_to_hf(state_dict, config):
    """The inverse of `rename_from_hf` for a plain model: {our name: tensor} -> {Hugging Face name: tensor}."""
    q, kv, out = config.n_head * config.head_dim, config.n_kv_head * config.head_dim, {}
    for ours, theirs in names(config).items():
        sizes = {1: None, 2: [config.mlp_hidden] * 2, 3: [q, kv, kv]}[len(theirs)]
        parts = state_dict[ours].split(sizes) if sizes else [state_dict[ours]]
        out.update({name: part.contiguous() for name, part in zip(theirs, parts)})
    return out


def config_from_hf(c, where):
    """GPTConfig of a config.json dictionary; UserError for anything our GPT has not."""
    rope = c.get('rope_parameters') or {}
    scaling = c.get('rope_scaling') or rope
    scaling = scaling.get('rope_type') or scaling.get('type', 'default')  # its older name
    refuse = {f"model_type {c.get('model_type')!r}": c.get('model_type') not in ('llama', 'qwen3'),
              "biases": c.get('attention_bias') or c.get('mlp_bias'),
              f"activation {c.get('hidden_act')!r}": c.get('hidden_act', 'silu') != 'silu',
              f"rope scaling {scaling!r}": scaling != 'default',
              "a sliding window": c.get('use_sliding_window')}
    for what, found in refuse.items():
        if found: raise UserError(f"{where}: {what} is not supported; Llama and Qwen3 without biases and rope scaling are")
    try:
        return GPTConfig(
            vocab_size=c['vocab_size'], block_size=c['max_position_embeddings'], n_layer=c['num_hidden_layers'],
            n_head=c['num_attention_heads'], n_kv_head=c.get('num_key_value_heads'), n_embd=c['hidden_size'],
            head_dim=c.get('head_dim'), mlp_hidden=c['intermediate_size'],
            rope_theta=float(c.get('rope_theta') or rope.get('rope_theta') or 1e4), norm_eps=c['rms_norm_eps'],
            qk_norm=c['model_type'] == 'qwen3', tie_embeddings=c.get('tie_word_embeddings', False))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: not a usable Llama or Qwen3 configuration ({error})") from None


def read_config(folder):
    """The GPTConfig of a Hugging Face folder; UserError if there is none."""
    path = os.path.join(folder, 'config.json')
    try:
        with open(path, encoding='utf-8') as f: return config_from_hf(json.load(f), path)
    except (OSError, ValueError, AttributeError) as error:  # missing, no JSON, JSON but no object
        raise UserError(f"{folder}: not a readable Hugging Face folder ({error})") from None


def load_state(folder):
    """
    A Hugging Face folder as `load_checkpoint` gives a checkpoint: a dict of config, model (weights in float32) and step. UserError if
    the folder is missing, damaged or not supported.
    """
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UserError(INSTALL) from None
    try:
        config = read_config(folder)
        files = sorted(f for f in os.listdir(folder) if f.endswith('.safetensors'))
        weights = {name: tensor.float() for f in files for name, tensor in load_file(os.path.join(folder, f)).items()}
        return dict(config=asdict(config), model=rename_from_hf(weights, config), step=0)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{folder}: no tensor {error} in its .safetensors files") from None
    except Exception as error:  # safetensors has error types of its own
        raise UserError(f"{folder}: not a readable Hugging Face folder ({' '.join(str(error).split())[:120]})") from None


def load_hf(folder):
    """A GPT with the weights of a Hugging Face folder; UserError as in `load_state`."""
    state = load_state(folder)
    model = GPT(GPTConfig(**state['config']))
    load_weights(model, state)
    return model


def save_hf(model, folder):
    """
    Write a plain GPT as config.json and model.safetensors. Padding rows of the vocabulary are left out, so the logits
    are the same. UserError if a mechanism is on: a stock model file would run such weights silently and wrongly.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise UserError(INSTALL) from None
    c = model.config
    on = {'depth_attn': c.depth_attn, 'ponder': c.ponder != 'none' and c.ponder_steps, 'embed_scale': c.embed_scale != 1}
    for name in on:
        if on[name]:
            raise UserError(f"{name}={getattr(c, name)}: only plain models are exported; Hugging Face's Llama and Qwen3 would "
                            "load these weights and compute something else")
    weights = {name: t[:c.n_tokens] if name in ('wte.weight', 'lm_head.weight') else t for name, t in model.state_dict().items()}
    weights = rename_to_hf(weights, c)
    if c.tie_embeddings: weights.pop('lm_head.weight', None)
    config = dict(
        model_type='qwen3' if c.qk_norm else 'llama', architectures=['Qwen3ForCausalLM' if c.qk_norm else 'LlamaForCausalLM'],
        vocab_size=c.n_tokens, max_position_embeddings=c.block_size, num_hidden_layers=c.n_layer, hidden_size=c.n_embd,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim, intermediate_size=c.mlp_hidden,
        rope_theta=c.rope_theta, rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tie_embeddings, hidden_act='silu',
        attention_bias=False, torch_dtype='float32')
    path = os.path.join(folder, 'model.safetensors')
    try:
        os.makedirs(folder, exist_ok=True)
        with whole(path, 'wb') as f: save_file(weights, f.name, metadata={'format': 'pt'})
        with whole(os.path.join(folder, 'config.json')) as f: json.dump(config, f, indent=1)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be written ({error})") from None


def main(argv):
    from sample import load_model
    _, rest = read(argv, __doc__.strip())
    if len(rest) != 2:
        raise UserError("name a checkpoint folder and a folder to write: python tools/hf.py out/vanilla exported/vanilla")
    save_hf(load_model(rest[0], 'cpu')[0], rest[1])
    print(f"wrote {rest[1]}")


if __name__ == '__main__':
    run(main)
