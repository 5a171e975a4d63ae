"""
Write a plain checkpoint as a Hugging Face folder, a Llama or Qwen3:

    python tools/hf.py out/vanilla exported/vanilla

Its config.json has the tokenizer's name, for this project, and the token that ends a text; for
others put the tokenizer's file beside it (bytes have none). The other way needs no program:
hf:FOLDER stands for a checkpoint, see docs/released.md.
"""

import json
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # from anywhere
from configurator import read
from engine import released
from engine.checkpoint import load_checkpoint, model_of, with_own_weights
from engine.files import UserError, on_disk, run, whole
from engine.generate import generate
from engine.shards import get_tokenizer
from engine.sums import source_of_model, sums_of
from engine.variant import ReleasedConfig
from model import GPT

# The parts of model.py that Llama and Qwen3 compute alike, and their sums: tests/test_released.py
# says how to renew one.
WRITTEN = {
    'RMSNorm': 'd9c8d91dad29',
    'rope_table': '40022dc4b33b',
    'apply_rope': '239985695722',
    'joined': '84a2a020f33a',
    'Memory': 'c2778f581b51',
    'Attention': '1db6bfa8abff',
    'MLP': 'b31626d0680e',
    'Block': '5da5201dffb9',
    'GPT.__init__': '631886c8e279',
    'GPT.hidden': '0c3555eea471',
    'Mechanism.new_memory': 'fbc48552eff0',
    'Plain.forward': '1f5e14ce8e64',
    'GPT.embed': 'f78a777e77ec',
    'GPT.trunk': '8a5bd1c0454e',
    'GPT.head': 'd6fdd657411d',
}


class ReleasedGPT(GPT):
    """A GPT for use as a library: it generates as programs do."""
    generate = generate

    def forward(self, idx, targets=None, jacobi=None):
        """jacobi: R of 'latent' for this call (None: the config's jacobi_iters)."""
        configs = self.config.jacobi_iters
        self.config.jacobi_iters = configs if jacobi is None else jacobi
        try:
            return super().forward(idx, targets)
        finally:
            self.config.jacobi_iters = configs


def load_released(folder, dtype=torch.float32):
    """A ReleasedGPT in eval mode with the weights of a Hugging Face folder, in `dtype`."""
    state = released.load_released(folder)
    model = with_own_weights(model_of(state).to(dtype), state).eval()
    model.__class__ = ReleasedGPT
    return model


def config_to_hf(config):
    """The dictionary of config.json that describes a plain GPT."""
    return dict(
        model_type='qwen3' if config.qk_norm else 'llama',
        architectures=['Qwen3ForCausalLM' if config.qk_norm else 'LlamaForCausalLM'],
        vocab_size=config.n_tokens,
        max_position_embeddings=config.block_size,
        num_hidden_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_kv_head,
        head_dim=config.head_dim,
        intermediate_size=config.mlp_hidden,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        hidden_act='silu',
        attention_bias=False,
        bos_token_id=None,      # or others would take numbers of their own
        eos_token_id=None,
        torch_dtype='float32')


def weights_to_hf(model):
    """{Hugging Face name: tensor} of a plain GPT, without the vocabulary's rows of padding."""
    c, out = model.config, {}
    q, kv = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    rows = {'c_attn': [q, kv, kv], 'c_fc': c.mlp_hidden}    # of each of theirs
    for ours, tensor in model.state_dict().items():
        module = ours.split('.')[-2]
        if module in ('wte', 'lm_head'):
            tensor = tensor[:c.n_tokens]                    # (n_tokens, C)
        parts = tensor.split(rows.get(module, len(tensor)))
        for name, part in zip(released.their_names(ours, released.LLAMA), parts):
            out[name] = part.clone()    # its own memory: safetensors takes no shared one
    return out


def save_hf(model, folder, tokenizer):
    """
    Write a plain GPT as config.json and model.safetensors; the logits are the same. tokenizer: its
    name. UserError for other models: a stock model file would run their weights, and wrongly.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise UserError(released.INSTALL) from None
    c = model.config
    if isinstance(c, ReleasedConfig) or c.depth_attn or c.ponder != 'none' or c.embed_scale != 1:
        raise UserError("only plain models are exported: Hugging Face's Llama and Qwen3 would load "
                        "the weights of this one and compute something else")
    sums = sums_of(source_of_model(), tuple(WRITTEN))
    changed = [part for part in WRITTEN if sums[part] != WRITTEN[part]]
    if changed:
        print(f"warning: {', '.join(changed)} of model.py was changed: see whether Hugging Face's "
              "Llama or Qwen3 computes the same", file=sys.stderr)
    described = {**config_to_hf(c), released.TOKENIZER: tokenizer}
    try:
        described['eos_token_id'] = get_tokenizer(tokenizer).eot_token
    except UserError as error:
        print(f"warning: config.json has no eos_token_id, so texts will not end: {error}",
              file=sys.stderr)
    with on_disk(folder, 'written'):
        os.makedirs(folder, exist_ok=True)
        with whole(os.path.join(folder, 'model.safetensors'), 'wb') as f:
            f.write(save(weights_to_hf(model), metadata={'format': 'pt'}))
        with whole(os.path.join(folder, 'config.json')) as f:
            json.dump(described, f, indent=1)


def main(argv):
    _, folders = read(argv, __doc__, files=False)
    if len(folders) != 2:
        raise UserError("name a checkpoint folder and a folder to write: python tools/hf.py "
                        "out/vanilla exported/vanilla")
    checkpoint, exported = folders
    if os.path.exists(os.path.join(exported, 'config.json')):
        raise UserError(f"{exported} holds a model: name another folder, or take that one away")
    state = load_checkpoint(checkpoint)
    save_hf(with_own_weights(model_of(state).float(), state), exported, state['tokenizer'])
    print(f"wrote {exported}")


if __name__ == '__main__':
    run(main)
