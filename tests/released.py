"""
Small Hugging Face folders with random weights, and what such models compute: slow loops over the
tensors as they stand in the files, which share no code with the model.
"""

import json
import math
import os

import safetensors.torch
import torch

from engine.bpe import byte_letters

NEOX = dict(
    model_type='gpt_neox',
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=48,
    hidden_act='gelu',
    layer_norm_eps=1e-5,
    max_position_embeddings=32,
    rotary_pct=0.25,
    rotary_emb_base=10000,
    use_parallel_residual=True,
    attention_bias=True,
    tie_word_embeddings=False,
    eos_token_id=0,
)
PONDER = dict(NEOX, ponderinglm=True, pondering_steps=3, scale_embeds=True,
              mutiply_pondering_steps=True)
LATENT = dict(NEOX, recurrent_model=True, num_latent_thoughts=1, num_jacobi_iterations=3,
              scale_embeds=True, interpolation=False)
DEPTH = dict(
    model_type='llama',
    vocab_size=60,
    hidden_size=32,
    head_dim=8,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    hidden_act='silu',
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    use_depth_attention=True,
    depth_attention_stride=2,
    depth_attention_recent_window=0,
    use_qk_norm=True,
    scale_embeds=False,
    eos_token_id=0,
)


# ---- folders -------------------------------------------------------------------------------------

def shapes(c):
    """{name: shape} of the tensors in a folder with this config.json."""
    C, H, V = c['hidden_size'], c['intermediate_size'], c['vocab_size']
    out = {}
    if c['model_type'] == 'gpt_neox':
        out['gpt_neox.embed_in.weight'] = (V, C)
        out['embed_out.weight'] = (V, C)
        out.update(pair('gpt_neox.final_layer_norm', (C,)))
        for i in range(c['num_hidden_layers']):
            layer = f'gpt_neox.layers.{i}'
            bias = c['attention_bias']
            out.update(pair(f'{layer}.input_layernorm', (C,)))
            out.update(pair(f'{layer}.post_attention_layernorm', (C,)))
            out.update(pair(f'{layer}.attention.query_key_value', (3 * C, C), bias))
            out.update(pair(f'{layer}.attention.dense', (C, C), bias))
            out.update(pair(f'{layer}.mlp.dense_h_to_4h', (H, C)))
            out.update(pair(f'{layer}.mlp.dense_4h_to_h', (C, H)))
    else:
        q, kv = (c[n] * c['head_dim'] for n in ('num_attention_heads', 'num_key_value_heads'))
        out['model.embed_tokens.weight'] = (V, C)
        out['lm_head.weight'] = (V, C)
        out['model.norm.weight'] = (C,)
        for i in range(c['num_hidden_layers']):
            layer = f'model.layers.{i}'
            out[f'{layer}.input_layernorm.weight'] = (C,)
            out[f'{layer}.post_attention_layernorm.weight'] = (C,)
            out[f'{layer}.self_attn.q_proj.weight'] = (q, C)
            out[f'{layer}.self_attn.k_proj.weight'] = (kv, C)
            out[f'{layer}.self_attn.v_proj.weight'] = (kv, C)
            out[f'{layer}.self_attn.o_proj.weight'] = (C, q)
            if c['use_qk_norm']:
                out[f'{layer}.self_attn.q_norm.weight'] = (c['head_dim'],)
                out[f'{layer}.self_attn.k_norm.weight'] = (c['head_dim'],)
            out[f'{layer}.mlp.gate_proj.weight'] = (H, C)
            out[f'{layer}.mlp.up_proj.weight'] = (H, C)
            out[f'{layer}.mlp.down_proj.weight'] = (C, H)
    return out


def pair(name, shape, bias=True):
    """A weight, and a bias of its first length."""
    out = {f'{name}.weight': shape}
    if bias:
        out[f'{name}.bias'] = shape[:1]
    return out


def random_weights(c, dtype=torch.float32):
    """Large enough that every part matters."""
    draw = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes(c).items():
        tensor = torch.randn(shape, generator=draw) * 0.2
        if 'norm' in name and name.endswith('weight'):
            tensor += 1
        weights[name] = tensor.to(dtype)
    if c['tie_word_embeddings']:
        for name in ('embed_out.weight', 'lm_head.weight'):
            weights.pop(name, None)
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


# all bytes, "he", "hello" in four merges, and runs of spaces as in GPT-NeoX: 265 tokens
TOKENIZER = dict(
    added_tokens=[added(0, '<|endoftext|>'), added(261, '  ', False, True),
                  added(262, '    ', False, True), added(264, '<|padding|>')],
    normalizer=dict(type='NFC'),
    pre_tokenizer=dict(type='ByteLevel', add_prefix_space=False, trim_offsets=True),
    model=dict(
        type='BPE',
        vocab={'<|endoftext|>': 0, 'he': 257, 'll': 258, 'hell': 259, 'hello': 260,
               **{letter: i + 1 for i, letter in enumerate(byte_letters())}},
        merges=['h e', 'l l', 'he ll', 'hell o']),
)


# ---- what the models compute ---------------------------------------------------------------------

def logits(ids, weights, c):
    """float64 logits (B,T,V) of tokens (B,T), under the tensors as they stand in the files."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    neox = c['model_type'] == 'gpt_neox'
    trunk = neox_trunk if neox else llama_trunk
    table = w['gpt_neox.embed_in.weight' if neox else 'model.embed_tokens.weight']
    head = w.get('embed_out.weight' if neox else 'lm_head.weight', table)
    C, T = c['hidden_size'], ids.size(1)
    pos = torch.arange(T)
    if c.get('ponderinglm'):
        table = table * (math.sqrt(C) if c['scale_embeds'] else 1)
        x = table[ids]
        if c['mutiply_pondering_steps']:
            x = x * c['pondering_steps']
        for _ in range(c['pondering_steps']):
            x = x + (trunk(x, pos, w, c) @ head.T).softmax(-1) @ table
        h = trunk(x, pos, w, c)
    elif c.get('recurrent_model'):
        h = latent(ids, table, trunk, w, c)
    else:
        table = table * (math.sqrt(C) if c.get('scale_embeds') else 1)
        h = trunk(table[ids], pos, w, c)
    return h @ head.T


def latent(ids, table, trunk, w, c):
    """PonderLM-2's K first sweeps, R more, and the last, over token-major slots."""
    K, R = c['num_latent_thoughts'], c['num_jacobi_iterations']
    scale = math.sqrt(2.5 * c['hidden_size']) if c['scale_embeds'] else 1
    slots = [table[ids] * scale]
    for sweep in range(K + R + 1):
        n = len(slots)
        x = torch.stack(slots, 2).flatten(1, 2)
        h = trunk(x, torch.arange(ids.size(1)).repeat_interleave(n), w, c)
        h = [h[:, i::n] for i in range(n)]
        slots = [slots[0], *h[:K]]
    return h[K]


def rotate(x, pos, theta, r):
    """Of x (B,S,heads,hd) the first r channels: j and j + r/2 by pos theta^(-2j/r)."""
    out = x.clone()
    for j in range(r // 2):
        angle = (pos * theta ** (-2 * j / r))[:, None].double()
        a, b = x[..., j], x[..., j + r // 2]
        out[..., j] = a * angle.cos() - b * angle.sin()
        out[..., j + r // 2] = b * angle.cos() + a * angle.sin()
    return out


def attention(q, k, v):
    """Causal; q (B,S,nh,hd), k and v (B,S,nkv,hd) -> (B, S, nh hd)."""
    S, hd = q.size(1), q.size(-1)
    k, v = (t.repeat_interleave(q.size(2) // t.size(2), 2) for t in (k, v))
    scores = torch.einsum('bqhd,bkhd->bhqk', q, k) / math.sqrt(hd)
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    p = scores.masked_fill(later, -math.inf).softmax(-1)
    return torch.einsum('bhqk,bkhd->bqhd', p, v).flatten(2)


def layer_norm(x, w, name, eps):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    return (x - mean) / (variance + eps).sqrt() * w[f'{name}.weight'] + w[f'{name}.bias']


def rms_norm(x, w, name, eps):
    """x itself where the file has no such norm."""
    if f'{name}.weight' not in w:
        return x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f'{name}.weight']


def linear(x, w, name):
    return x @ w[f'{name}.weight'].T + w.get(f'{name}.bias', 0)


def gelu(x, kind):
    if kind == 'gelu':
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3))) / 2


def neox_trunk(x, pos, w, c):
    nh, eps = c['num_attention_heads'], c['layer_norm_eps']
    hd = c['hidden_size'] // nh
    turning = int(hd * c['rotary_pct'])
    for i in range(c['num_hidden_layers']):
        layer = f'gpt_neox.layers.{i}'
        a = layer_norm(x, w, f'{layer}.input_layernorm', eps)
        qkv = linear(a, w, f'{layer}.attention.query_key_value')
        q, k, v = qkv.unflatten(-1, (nh, 3 * hd)).split(hd, -1)         # each (B,S,nh,hd)
        q = rotate(q, pos, c['rotary_emb_base'], turning)
        k = rotate(k, pos, c['rotary_emb_base'], turning)
        y = linear(attention(q, k, v), w, f'{layer}.attention.dense')
        between = x if c['use_parallel_residual'] else x + y
        m = layer_norm(between, w, f'{layer}.post_attention_layernorm', eps)
        m = gelu(linear(m, w, f'{layer}.mlp.dense_h_to_4h'), c['hidden_act'])
        x = x + y + linear(m, w, f'{layer}.mlp.dense_4h_to_h')
    return layer_norm(x, w, 'gpt_neox.final_layer_norm', eps)


def llama_trunk(x, pos, w, c):
    """With the released Depth-Attention's order: queries normed and turned, keys turned first."""
    hd, eps = c['head_dim'], c['rms_norm_eps']
    made = []                                                           # (keys, values) by layer
    for i in range(c['num_hidden_layers']):
        layer = f'model.layers.{i}'
        a = rms_norm(x, w, f'{layer}.input_layernorm', eps)
        q = linear(a, w, f'{layer}.self_attn.q_proj').unflatten(-1, (-1, hd))
        k = linear(a, w, f'{layer}.self_attn.k_proj').unflatten(-1, (-1, hd))
        v = linear(a, w, f'{layer}.self_attn.v_proj').unflatten(-1, (-1, hd))
        q = rotate(rms_norm(q, w, f'{layer}.self_attn.q_norm', eps), pos, c['rope_theta'], hd)
        k = rms_norm(rotate(k, pos, c['rope_theta'], hd), w, f'{layer}.self_attn.k_norm', eps)
        if c.get('use_depth_attention'):
            v = mix(q, k, v, made[:i:c.get('depth_attention_stride', 1)])
        made.append((k, v))
        x = x + linear(attention(q, k, v), w, f'{layer}.self_attn.o_proj')
        a = rms_norm(x, w, f'{layer}.post_attention_layernorm', eps)
        gate = linear(a, w, f'{layer}.mlp.gate_proj')
        up = linear(a, w, f'{layer}.mlp.up_proj')
        x = x + linear(gate * gate.sigmoid() * up, w, f'{layer}.mlp.down_proj')
    return rms_norm(x, w, 'model.norm', eps)


def mix(q, k, v, sources):
    """Depth-Attention: the values of `sources` [(keys, values), ..] join v (B,S,nkv,hd)."""
    sources = [*sources, (k, v)]
    mean = q.unflatten(2, (k.size(2), -1)).mean(3)                      # (B,S,nkv,hd)
    scores = [(mean * k_j).sum(-1) / math.sqrt(q.size(-1)) for k_j, _ in sources]
    weights = torch.stack(scores, -1).softmax(-1)                       # (B,S,nkv,sources)
    return sum(weights[..., j, None] * v_j for j, (_, v_j) in enumerate(sources))
