"""
Small Hugging Face folders with random weights, and what Llama-like ones compute: slow loops over
the tensors as they stand in the files, which share no code with the model.
"""

import json
import math
import os

import safetensors.torch
import torch
import torch.nn.functional as F

from engine.released import byte_letters

# as many rows as the tokenizer below has tokens, and some more
COMMON = dict(vocab_size=270, hidden_size=32, intermediate_size=48, max_position_embeddings=64,
              tie_word_embeddings=False, eos_token_id=0)
NEOX = dict(COMMON, model_type='gpt_neox', num_hidden_layers=3, num_attention_heads=2,
            hidden_act='gelu', layer_norm_eps=1e-5, rotary_pct=0.25, rotary_emb_base=10000,
            use_parallel_residual=True, attention_bias=True)
PONDER = dict(NEOX, ponderinglm=True, pondering_steps=3, scale_embeds=True,
              mutiply_pondering_steps=True)
LATENT = dict(NEOX, recurrent_model=True, num_latent_thoughts=1, num_jacobi_iterations=3,
              scale_embeds=True, interpolation=False)
LLAMA = dict(COMMON, model_type='llama', num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, hidden_act='silu', rms_norm_eps=1e-5,
             rope_theta=10000.0)
DEPTH = dict(LLAMA, use_depth_attention=True, depth_attention_stride=2, use_qk_norm=True,
             depth_attention_recent_window=0, scale_embeds=False)
OURO = dict(LLAMA, model_type='ouro', num_hidden_layers=2, num_key_value_heads=4,
            rope_scaling=None, use_sliding_window=False, layer_types=['full_attention'] * 2,
            total_ut_steps=4, early_exit_threshold=1.0)


# ---- folders -------------------------------------------------------------------------------------
# Tensors of each kind of folder; * is a layer. Then the shape: V vocabulary, C width, H width of
# the MLP, Q, K and D width of all queries, of all keys, of a head; and + if there is a bias, too.

NEOX_TENSORS = """
gpt_neox.embed_in VC, embed_out VC, gpt_neox.final_layer_norm C+,
gpt_neox.layers.*.input_layernorm C+, gpt_neox.layers.*.post_attention_layernorm C+,
gpt_neox.layers.*.attention.query_key_value 3C+, gpt_neox.layers.*.attention.dense CC+,
gpt_neox.layers.*.mlp.dense_h_to_4h HC+, gpt_neox.layers.*.mlp.dense_4h_to_h CH+"""
LLAMA_TENSORS = """
model.embed_tokens VC, lm_head VC, model.norm C,
model.layers.*.input_layernorm C, model.layers.*.post_attention_layernorm C,
model.layers.*.self_attn.q_proj QC, model.layers.*.self_attn.k_proj KC,
model.layers.*.self_attn.v_proj KC, model.layers.*.self_attn.o_proj CQ,
model.layers.*.mlp.gate_proj HC, model.layers.*.mlp.up_proj HC, model.layers.*.mlp.down_proj CH"""
QK_NORM_TENSORS = """,
model.layers.*.self_attn.q_norm D, model.layers.*.self_attn.k_norm D"""
OURO_TENSORS = """,
model.early_exit_gate 1C+,
model.layers.*.input_layernorm_2 C, model.layers.*.post_attention_layernorm_2 C"""


def tensors_of(c):
    """[(module, shape), ..] of a folder with this config.json."""
    names = NEOX_TENSORS if c['model_type'] == 'gpt_neox' else LLAMA_TENSORS
    names += OURO_TENSORS if c['model_type'] == 'ouro' else ''
    names += QK_NORM_TENSORS if c.get('use_qk_norm') else ''
    return [name.split() for name in names.split(',')]


def random_weights(c):
    """{name: tensor} of a folder with this config.json, large enough that every part matters."""
    C, nh = c['hidden_size'], c['num_attention_heads']
    hd = c.get('head_dim', C // nh)
    sizes = {'V': c['vocab_size'], 'C': C, 'H': c['intermediate_size'], 'D': hd, 'Q': nh * hd,
             'K': c.get('num_key_value_heads', nh) * hd, '3': 3 * C, '1': 1}
    draw, weights = torch.Generator().manual_seed(0), {}
    for generic, letters in tensors_of(c):
        if c['tie_word_embeddings'] and generic in ('embed_out', 'lm_head'):
            continue
        shape = [sizes[letter] for letter in letters.strip('+')]
        bias = '+' in letters and ('attention.' not in generic or c['attention_bias'])
        for layer in range(c['num_hidden_layers'] if '*' in generic else 1):
            name = generic.replace('*', str(layer))
            weights[f'{name}.weight'] = torch.randn(shape, generator=draw) * 0.2 + ('norm' in name)
            if bias:
                weights[f'{name}.bias'] = torch.randn(shape[:1], generator=draw) * 0.2
    return weights


def write_folder(folder, c, weights=None, tokenizer=False):
    """Leave config.json and model.safetensors; returns (the folder's path, the weights)."""
    os.makedirs(folder, exist_ok=True)
    weights = random_weights(c) if weights is None else weights
    safetensors.torch.save_file(weights, os.path.join(folder, 'model.safetensors'))
    write_json(os.path.join(folder, 'config.json'), c)
    if tokenizer:
        write_json(os.path.join(folder, 'tokenizer.json'), TOKENIZER)
    return str(folder), weights


def write_json(path, content):
    with open(path, 'w', encoding='utf-8') as f:
        json.dump(content, f)


def added(number, content, special=True, normalized=False):
    return dict(id=number, content=content, single_word=False, lstrip=False, rstrip=False,
                normalized=normalized, special=special)


# all bytes, "he", "hello" in four merges, and runs of spaces as in GPT-NeoX: 264 tokens
TOKENIZER = dict(
    version='1.0',
    added_tokens=[added(0, '<|endoftext|>'), added(261, '  ', False, True),
                  added(262, '    ', False, True), added(263, '<|padding|>')],
    normalizer=dict(type='NFC'),
    pre_tokenizer=dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True),
    decoder=dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True),
    model=dict(
        type='BPE',
        vocab={'<|endoftext|>': 0, 'he': 257, 'll': 258, 'hell': 259, 'hello': 260,
               **{letter: i + 1 for i, letter in enumerate(byte_letters())}},
        merges=['h e', 'l l', 'he ll', 'hell o']),
)


# ---- what Llama-like models compute --------------------------------------------------------------

def llama_trunk(x, w, c):
    """
    Embeddings (B,T,C) -> hidden states, all float64. Keys are turned before they are normed, as in
    the code of Depth-Attention's authors. w: the tensors of the files.
    """
    hd, eps = c['head_dim'], c['rms_norm_eps']
    made = []                                                           # (keys, values) by layer
    for i in range(c['num_hidden_layers']):
        start = f'model.layers.{i}.'
        layer = {name.removeprefix(start): w[name] for name in w if name.startswith(start)}
        a = rms_norm(x, layer, 'input_layernorm', eps)
        q, k, v = (linear(a, layer, f'self_attn.{name}_proj').unflatten(-1, (-1, hd))
                   for name in 'qkv')
        q = rotate(rms_norm(q, layer, 'self_attn.q_norm', eps), c['rope_theta'])
        k = rms_norm(rotate(k, c['rope_theta']), layer, 'self_attn.k_norm', eps)
        if c.get('use_depth_attention'):
            v = mix(q, k, v, made[:i:c['depth_attention_stride']])
        made.append((k, v))
        y = linear(attention(q, k, v), layer, 'self_attn.o_proj')
        x = x + rms_norm(y, layer, 'input_layernorm_2', eps)
        a = rms_norm(x, layer, 'post_attention_layernorm', eps)
        gate = linear(a, layer, 'mlp.gate_proj')
        y = linear(gate * gate.sigmoid() * linear(a, layer, 'mlp.up_proj'), layer, 'mlp.down_proj')
        x = x + rms_norm(y, layer, 'post_attention_layernorm_2', eps)
    return rms_norm(x, w, 'model.norm', eps)


def linear(x, w, name):
    return x @ w[f'{name}.weight'].T


def rms_norm(x, w, name, eps):
    """x itself where the file has no such norm."""
    weight = w.get(f'{name}.weight')
    return x if weight is None else F.rms_norm(x, weight.shape, weight, eps)


def rotate(x, theta):
    """Of x (B,T,heads,hd) the channels j and j + hd/2, by t theta^(-2j/hd)."""
    half = x.size(-1) // 2
    t = torch.arange(x.size(1))[:, None, None].double()
    angle = t * theta ** (-torch.arange(half).double() / half)
    a, b = x.split(half, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(q, k, v):
    """Causal; q (B,T,nh,hd), k and v (B,T,nkv,hd) -> (B, T, nh hd)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


def mix(q, k, v, sources):
    """Depth-Attention: the values of `sources` [(keys, values), ..] join v (B,T,nkv,hd)."""
    sources = [*sources, (k, v)]
    mean = q.unflatten(2, (k.size(2), -1)).mean(3)                      # (B,T,nkv,hd)
    scores = [(mean * k_j).sum(-1) / math.sqrt(q.size(-1)) for k_j, _ in sources]
    weights = torch.stack(scores, -1).softmax(-1)                       # (B,T,nkv,sources)
    return sum(weights[..., j, None] * v_j for j, (_, v_j) in enumerate(sources))


def ouro(ids, w, c):
    """
    Of tokens (B,T): the logits after each pass, [(B,T,V)], the probability of leaving after each,
    [(B,T)], and the pass after which each leaves, (B,T), counted from 0: the first at which the sum
    of these reaches early_exit_threshold.
    """
    h = w['model.embed_tokens.weight'][ids]
    head = w.get('lm_head.weight', w['model.embed_tokens.weight'])
    logits, p, stays = [], [], 1.0
    for step in range(c['total_ut_steps']):
        h = llama_trunk(h, w, c)                    # with the final norm, which goes on
        logits.append(h @ head.T)
        lam = (h @ w['model.early_exit_gate.weight'][0] + w['model.early_exit_gate.bias']).sigmoid()
        last = step == c['total_ut_steps'] - 1
        p.append(stays * (torch.ones_like(lam) if last else lam))
        stays = stays * (1 - lam)
    reached = torch.stack(p).cumsum(0) >= c['early_exit_threshold'] - 1e-12
    reached[-1] = True
    return logits, p, reached.byte().argmax(0)
