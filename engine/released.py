"""
Hugging Face folders: Llama, Qwen3 and GPT-NeoX decoders, and the authors' PonderLM, PonderLM-2,
Depth-Attention and Ouro models, which are these with more keys in config.json.

    settings = describe(folder)             what config.json says, as {setting of GPTConfig: value}
    state = load_released(folder)           that and the weights, as a checkpoint's
    tokenizer = FolderTokenizer(folder)     of tokenizer.json

Nothing of a folder is executed. What it needs is in requirements-hf.txt, which also brings `hf`,
the command that fetches folders.

Keys of config.json, and what `describe` makes of them:

    total_ut_steps              of Ouro: ponder='loop', ponder_steps (one less)
    early_exit_threshold        of Ouro: halt_tau (1 - it)
    ponderinglm                 ponder='embedding'; pondering_steps: ponder_steps
    recurrent_model             ponder='latent'; num_latent_thoughts: ponder_steps
    num_jacobi_iterations       jacobi_iters: sweeps when a text is read at once
    use_depth_attention         depth_attn; depth_attention_stride: depth_stride (1 if missing)
    scale_embeds                embed_scale: sqrt(C), for PonderLM-2 sqrt(2.5 C)
    mutiply_pondering_steps     tokens' embeddings are multiplied by the steps, mixtures are not
    use_qk_norm                 of a Llama: queries are normed before the rotation, keys after it
    rotary_pct, rotary_emb_base, use_parallel_residual, attention_bias, hidden_act
                                the block of GPT-NeoX

--ponder_steps changes the steps and leaves the factor on the input as trained. In the authors' code
the factor would change too, and be 0 without steps.

Full passes agree with the authors' code for PonderLM, PonderLM-2 and GPT-NeoX, to 1e-8 relative
error in float64. Where that code decodes, it differs. We ran it on random weights, with their model
files and transformers 4.46.1:

- PonderLM: generate(use_cache=True) gives other tokens than recomputing, from the first one on. Its
  inner passes get no cache, so with one the model sees the newest token alone. Here each pass has a
  cache of its own.
- PonderLM-2 on GPT-NeoX: generate(use_cache=True) ends with an error about sizes, because the file
  has no branch for single tokens. Here a token's slots follow one another in one cache.

And we read it:

- Depth-Attention: the cache is updated before values are mixed, so it keeps raw values. Here it
  keeps the mixed ones, which is what a later token reads when all is recomputed.
- PonderLM-2 scores a text with num_jacobi_iterations sweeps, and so do we. Generation is the
  recursion itself; a prompt is read exactly with --exact=True.
- Ouro computes all passes and picks one afterwards. Here later tokens read the last keys and values
  that a token has.
"""

import hashlib
import json
import math
import os
import re
from dataclasses import asdict

import numpy as np
import torch

from engine.build import config_of, without_numbers
from engine.files import UserError, stamp
from engine.variant import Variant, rope_theta, variant_of

INSTALL = "this needs more packages: pip install -r requirements-hf.txt"
TOKENIZER = 'nanoponder_tokenizer'  # key of config.json, from tools/hf.py: shards.py's name for it

# ---- config.json ---------------------------------------------------------------------------------

FAMILIES = ('llama', 'qwen3', 'gpt_neox', 'ouro')
GELU = {'gelu': 'none', 'gelu_new': 'tanh', 'gelu_fast': 'tanh', 'gelu_pytorch_tanh': 'tanh'}

# the values of a key with which we compute what the models' own code does; that it is missing,
# null, 0 or false is right everywhere
ONLY = {
    'rope_type': ('default',),
    'type': ('default',),               # the same in older files
    'softmax_temperature': (1,),
    **dict.fromkeys((
        'quantization_config', 'compression_config', 'interpolation',
        # switches of the authors' other experiments
        'depth_attention_recent_window', 'depth_recent_window', 'cross_layer_pattern',
        'cross_layer_mode', 'layer_kv_reuse_map', 'baseline_mode'), ()),
}
ONLY_NEOX = {**ONLY, 'hidden_act': tuple(GELU), 'use_depth_attention': ()}
ONLY_LLAMA = {**ONLY, 'hidden_act': ('silu',), 'partial_rotary_factor': (1,),
              **dict.fromkeys(('attention_bias', 'mlp_bias', 'use_sliding_window'), ())}


def describe(folder):
    """
    {setting: value} of the model in a Hugging Face folder, its variant too. UserError if there is
    none, or it asks for what we have not.
    """
    c = read_config(folder)
    path = os.path.join(folder, 'config.json')
    refuse_others(c, path)
    try:
        return settings_of(c)
    except KeyError as error:
        raise UserError(f"{path}: lacks {error}") from None


def settings_of(c):
    """The same of what config.json holds; KeyError for what it lacks."""
    settings = dict(
        vocab_size=c['vocab_size'],
        block_size=c['max_position_embeddings'],
        n_layer=c['num_hidden_layers'],
        n_head=c['num_attention_heads'],
        n_embd=c['hidden_size'],
        mlp_hidden=c['intermediate_size'],
        tie_embeddings=bool(c.get('tie_word_embeddings')))
    add_family = add_neox if c['model_type'] == 'gpt_neox' else add_llama
    variant = add_family(settings, c)
    if c.get('ponderinglm') and c.get('mutiply_pondering_steps'):
        variant.input_factor = float(c['pondering_steps'])
    add_mechanism(settings, c)
    settings['variant'] = None if variant == Variant() else asdict(variant)
    return settings


def read_config(folder):
    """config.json as a dictionary, what newer files say of rotary positions beside the rest."""
    if not os.path.isdir(folder):
        name = f"models/{os.path.basename(folder)}"
        how = (f". If it is a model on Hugging Face: pip install -r requirements-hf.txt && "
               f"hf download {folder} --local-dir {name}, then name it as hf:{name}")
        is_owner_and_name = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', folder)
        raise UserError(f"{folder}: no such folder{how if is_owner_and_name else ''}")
    path = os.path.join(folder, 'config.json')
    try:
        with open(path, encoding='utf-8') as f:
            c = json.load(f)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable, so {folder} is no Hugging Face folder, or not a "
                        f"whole one ({error})") from None
    return {**c, **(c.get('rope_scaling') or {}), **(c.get('rope_parameters') or {})}


def refuse_others(c, path):
    """UserError for the first key of config.json that asks for what we have not."""
    kind = c.get('model_type')
    if kind not in FAMILIES:
        raise UserError(f"{path}: model_type={kind!r} is not supported, only {', '.join(FAMILIES)}")
    table = ONLY_NEOX if kind == 'gpt_neox' else ONLY_LLAMA
    for key, allowed in table.items():
        value = c.get(key)
        if value and value not in allowed:
            only = f", only {' or '.join(map(str, allowed))}" if allowed else ''
            raise UserError(f"{path}: {key}={str(value)[:60]} is not supported{only}")
    contradicts = {
        'layer_types': set(c.get('layer_types') or ()) - {'full_attention'},
        # which in the authors' code turns Depth-Attention off
        'recurrent_model': c.get('use_depth_attention') and c.get('recurrent_model') is False,
        'pondering_steps': c.get('pondering_steps') and 'ponderinglm' not in c,
    }
    for key, wrong in contradicts.items():
        if wrong:
            raise UserError(f"{path}: {key}={str(c[key])[:60]} is not supported, or contradicts "
                            "the rest of it")


def add_llama(settings, c):
    """Settings of Llama, Qwen3 and Ouro; returns the Variant."""
    kind = c['model_type']
    # in the code of Depth-Attention's authors, Llama has it unless the file says no
    qk_norm = kind == 'qwen3' or bool(c.get('use_qk_norm', c.get('use_depth_attention')))
    settings.update(
        n_kv_head=c.get('num_key_value_heads'),
        head_dim=c.get('head_dim'),
        rope_theta=c.get('rope_theta') or 1e4,
        norm_eps=c['rms_norm_eps'],
        qk_norm=qk_norm)
    return Variant(late_k_norm=kind == 'llama' and qk_norm, sandwich=kind == 'ouro')


def add_neox(settings, c):
    """Settings of GPT-NeoX; returns the Variant."""
    head_dim = c['hidden_size'] // c['num_attention_heads']
    turning = int(head_dim * (c.get('partial_rotary_factor') or c.get('rotary_pct') or 0.25))
    theta = c.get('rope_theta') or c.get('rotary_emb_base') or 1e4
    settings.update(
        rope_theta=rope_theta(theta, head_dim, turning),
        norm_eps=c.get('layer_norm_eps', 1e-5),
        qk_norm=False)
    return Variant(
        neox=True,
        parallel_residual=c.get('use_parallel_residual', True),
        attention_bias=c.get('attention_bias', True),
        gelu=GELU[c.get('hidden_act', 'gelu')],
        turning=turning)


def add_mechanism(settings, c):
    """Settings of a paper's mechanism, and the scale of embeddings."""
    scale = math.sqrt(c['hidden_size']) if c.get('scale_embeds') else 1.0
    if c['model_type'] == 'ouro':
        settings.update(ponder='loop', ponder_steps=c.get('total_ut_steps', 4) - 1, loop_norm=True,
                        halting='ouro', ouro_stage=2,
                        halt_tau=1 - c.get('early_exit_threshold', 1.0))
    elif c.get('use_depth_attention'):
        settings.update(depth_attn=True, depth_stride=c.get('depth_attention_stride') or 1)
    elif c.get('ponderinglm'):
        settings.update(ponder='embedding', ponder_steps=c['pondering_steps'])
    elif c.get('recurrent_model'):
        scale *= math.sqrt(2.5) if c.get('scale_embeds') else 1.0
        settings.update(ponder='latent', ponder_steps=c['num_latent_thoughts'],
                        jacobi_iters=c.get('num_jacobi_iterations', 3))
    settings['embed_scale'] = scale     # as these weights know it, whatever mechanism a run adds


# ---- weights -------------------------------------------------------------------------------------
# Our names of modules, and theirs; * is the number of the layer. Several of theirs, one under the
# other, are one of ours.

LLAMA = {
    'wte': ['model.embed_tokens'],
    'ln_f': ['model.norm'],
    'lm_head': ['lm_head'],
    'mechanism.gate': ['model.early_exit_gate'],
    'h.*.ln_1': ['model.layers.*.input_layernorm'],
    'h.*.ln_1_out': ['model.layers.*.input_layernorm_2'],
    'h.*.attn.c_attn': ['model.layers.*.self_attn.q_proj',
                        'model.layers.*.self_attn.k_proj',
                        'model.layers.*.self_attn.v_proj'],
    'h.*.attn.q_norm': ['model.layers.*.self_attn.q_norm'],
    'h.*.attn.k_norm': ['model.layers.*.self_attn.k_norm'],
    'h.*.attn.c_proj': ['model.layers.*.self_attn.o_proj'],
    'h.*.ln_2': ['model.layers.*.post_attention_layernorm'],
    'h.*.ln_2_out': ['model.layers.*.post_attention_layernorm_2'],
    'h.*.mlp.c_fc': ['model.layers.*.mlp.gate_proj',
                     'model.layers.*.mlp.up_proj'],
    'h.*.mlp.c_proj': ['model.layers.*.mlp.down_proj'],
}
NEOX = {
    'wte': ['gpt_neox.embed_in'],
    'ln_f': ['gpt_neox.final_layer_norm'],
    'lm_head': ['embed_out'],
    'h.*.ln_1': ['gpt_neox.layers.*.input_layernorm'],
    'h.*.attn.c_attn': ['gpt_neox.layers.*.attention.query_key_value'],
    'h.*.attn.c_proj': ['gpt_neox.layers.*.attention.dense'],
    'h.*.ln_2': ['gpt_neox.layers.*.post_attention_layernorm'],
    'h.*.mlp.c_fc': ['gpt_neox.layers.*.mlp.dense_h_to_4h'],
    'h.*.mlp.c_proj': ['gpt_neox.layers.*.mlp.dense_4h_to_h'],
}

# tensors that stand in released files and that no computation reads
MEANINGLESS = ('adapter.weight', 'lm_head_layernorm.weight', 'lm_head.weight', 'embed_out.weight',
               '.attention.bias', '.attention.masked_bias', '.rotary_emb.inv_freq')


def their_names(ours, table):
    """What one of our tensors is called there: the names of its parts."""
    module, kind = ours.rsplit('.', 1)
    layer = module.split('.')[1] if module.startswith('h.') else ''
    generic = module.replace(f'h.{layer}.', 'h.*.', 1)
    return [f"{theirs.replace('*', layer)}.{kind}" for theirs in table[generic]]


def load_released(folder):
    """
    A Hugging Face folder as `load_checkpoint` gives a checkpoint: a dict of config, model (weights
    as they are stored, mapped into memory), step, settings, tokenizer, optimizer, files (the stamps
    of its files of weights). UserError if the folder is missing, damaged or not supported.
    """
    config = describe(folder)
    files = {path: stamp(path) for path in weight_files(folder)}
    weights = read_weights(folder, config_of(config))
    has_its_file = os.path.exists(os.path.join(folder, 'tokenizer.json'))
    named = None if has_its_file else read_config(folder).get(TOKENIZER)
    return dict(config=config, model=weights, step=0, settings={},
                tokenizer=named or f'hf:{folder}', optimizer={}, files=files)


def read_weights(folder, config):
    """{our name: tensor}; UserError if one is missing, misshapen, or there and nothing reads it."""
    stored = dict(tensors(folder))
    neox = variant_of(config).neox
    used, weights = set(), {}
    for ours, outline in without_numbers(config).state_dict().items():
        if ours == 'lm_head.weight' and config.tie_embeddings:
            weights[ours] = weights['wte.weight']
            continue
        names = their_names(ours, NEOX if neox else LLAMA)
        used.update(names)
        missing = [name for name in names if name not in stored]
        if missing:
            raise UserError(f"{folder}: no tensor {missing[0]} in its files of weights")
        parts = [stored[name] for name in names]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if weight.shape != outline.shape:
            raise UserError(f"{folder}: {' and '.join(names)} {tuple(weight.shape)}, config.json "
                            f"says {tuple(outline.shape)}")
        if neox and '.c_attn.' in ours:     # q, k, v of head 0, of head 1, .. -> q of all heads, ..
            weight = weight.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        weights[ours] = weight
    for name in stored:
        if name not in used and not name.endswith(MEANINGLESS):
            raise UserError(f"{folder}: unknown tensor {name}: this is another model than its "
                            "config.json says")
    return weights


def tensors(folder):
    """Yields (name, tensor), mapped into memory, of all weights; UserError if one is cut."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise UserError(INSTALL) from None
    for path in weight_files(folder):
        try:
            if path.endswith('.safetensors'):
                with safe_open(path, 'pt') as f:
                    yield from [(name, f.get_tensor(name)) for name in f.keys()]
            else:
                yield from torch.load(path, weights_only=True, mmap=True).items()
        except Exception as error:              # on a file that was cut, or is another, nearly any
            raise UserError(f"{path}: missing, damaged, or no file of weights "
                            f"({str(error)[:120]}); fetch it again") from None


def weight_files(folder):
    """The paths of a folder's weights; UserError if there are none."""
    for name in 'model.safetensors', 'pytorch_model.bin':
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return [path]
        if os.path.exists(f'{path}.index.json'):    # they are spread over several files
            with open(f'{path}.index.json', encoding='utf-8') as f:
                names = set(json.load(f)['weight_map'].values())
            return [os.path.join(folder, name) for name in sorted(names)]
    raise UserError(f"{folder}: no weights, neither model.safetensors nor pytorch_model.bin, whole "
                    "or in parts")


# ---- tokenizer.json ------------------------------------------------------------------------------

class FolderTokenizer:
    """
    What programs ask of a tiktoken Encoding, of a folder's tokenizer.json: byte-level BPE, as
    GPT-NeoX, Llama 3, Qwen and Ouro have it. Special tokens are text where they stand in one. A
    model may have more rows than there are tokens: such a token decodes to nothing.
    """

    def __init__(self, folder):
        try:
            from tokenizers import Tokenizer, decoders
        except ImportError:
            raise UserError(INSTALL) from None
        path = os.path.join(folder, 'tokenizer.json')
        if not os.path.exists(path):
            raise UserError(f"{folder}: no tokenizer.json in it, so there are no texts for this "
                            "model: put the one of the model there")
        try:
            self.library = Tokenizer.from_file(path)
        except Exception as error:              # the library has no class for it
            raise UserError(f"{path}: not readable ({error}); fetch it again") from None
        if not isinstance(self.library.decoder, decoders.ByteLevel):
            raise UserError(f"{path}: only byte-level BPE is supported, as in GPT-NeoX, Llama 3, "
                            "Qwen and Ouro")
        self.library.encode_special_tokens = True
        self.library.no_truncation()    # the file may ask to cut or fill up what is encoded
        self.library.no_padding()
        self.name = f'hf:{folder}'
        tokens = sorted(self.library.get_vocab(with_added_tokens=False).items())
        self.id = '+'.join(hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
                           for part in (tokens, how_it_reads(self.library.to_str())))
        self.n_vocab = max(self.library.get_vocab().values()) + 1
        self.added = self.library.get_added_tokens_decoder()
        eos = read_config(folder).get('eos_token_id')   # ends a document; there may be a list
        eos = eos[0] if isinstance(eos, list) else eos
        self.eot_token = self.library.token_to_id('<|endoftext|>') if eos is None else eos
        if self.eot_token is None:
            raise UserError(f"{folder}/config.json: no eos_token_id, the token that ends a text: "
                            "add it")

    def encode_ordinary(self, text):
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_to_numpy(self, text, disallowed_special=()):
        return np.array(self.encode_ordinary(text), dtype=np.uint32)

    def decode(self, tokens):
        return b''.join(map(self.decode_single_token_bytes, tokens)).decode('utf-8', 'replace')

    def decode_single_token_bytes(self, token):
        if token in self.added:
            return self.added[token].content.encode()
        letters = self.library.id_to_token(token) or ''
        return bytes(BYTES[letter] for letter in letters)


def how_it_reads(text):
    """
    What the text of tokenizer.json says of how tokens are found, without what changes none:
    lengths, offsets, and what is empty, which some versions of the library leave out.
    """
    def with_effect(fields):
        return {name: value for name, value in fields.items()
                if name != 'trim_offsets' and (value or type(value) is int)}

    c = json.loads(text, object_hook=with_effect)
    return [c.get(name) for name in ('added_tokens', 'normalizer', 'pre_tokenizer', 'model')]


def byte_letters():
    """
    {letter: byte} of the alphabet in which tokenizer.json writes bytes, GPT-2's: those that are
    printable in Latin-1 stand for themselves, the others, in their order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [*printable, *range(0x100, 0x100 + len(others))]
    return {chr(letter): byte for letter, byte in zip(letters, printable + others)}


BYTES = byte_letters()
