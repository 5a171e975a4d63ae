"""
Hugging Face folders in and out.

    python tools/hf.py fetch EleutherAI/pythia-410m models/pythia
        download a model; HF_ENDPOINT=https://... before it names a mirror
    python tools/hf.py out/vanilla exported/vanilla
        write a plain checkpoint as a Llama or Qwen3 folder (pip install safetensors)

hf:FOLDER stands for a checkpoint: python sample.py hf:models/pythia --start="..". docs/released.md
has the models that work.
"""

import json
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # run from anywhere
from configurator import read
from engine.checkpoint import model_of
from engine.files import UserError, run, whole
from engine.hub import fetch_model
from engine import huggingface
from engine.huggingface import INSTALL, rename_from_hf, rename_to_hf
from engine.variant import ReleasedConfig
from sample import load_model

__all__ = ['load_released', 'save_hf', 'rename_from_hf', 'rename_to_hf']


def load_released(folder, dtype=torch.float32):
    """
    A FastGPT in eval mode with the weights of a Hugging Face folder, in `dtype`; UserError as in
    engine/huggingface.py.
    """
    return model_of(huggingface.load_released(folder, dtype)).eval()


def refuse_others(model):
    """UserError if this is no plain GPT: a stock model file would run its weights, and wrongly."""
    if isinstance(model.config, ReleasedConfig):
        raise UserError("this model came from a Hugging Face folder with another architecture: "
                        "only plain models are exported")
    config = model.config
    on = {
        'depth_attn': config.depth_attn,
        'ponder': config.ponder != 'none' and config.ponder_steps > 0,
        'embed_scale': config.embed_scale != 1,
    }
    for name, is_on in on.items():
        if is_on:
            raise UserError(f"{name}={getattr(config, name)}: only plain models are exported; "
                            "Hugging Face's Llama and Qwen3 would load these weights and compute "
                            "something else")


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
        torch_dtype='float32')


def weights_to_hf(model):
    """{Hugging Face name: tensor} of a plain GPT, without the vocabulary's rows of padding."""
    config = model.config
    weights = model.state_dict()
    for name in ('wte.weight', 'lm_head.weight'):
        weights[name] = weights[name][:config.n_tokens]     # (n_tokens, C)
    return rename_to_hf(weights, config)


def save_hf(model, folder):
    """
    Write a plain GPT as config.json and model.safetensors. Padding rows of the vocabulary are left
    out, so the logits are the same. UserError if a mechanism is on.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise UserError(INSTALL) from None

    refuse_others(model)
    weights = weights_to_hf(model)
    config = config_to_hf(model.config)
    try:
        os.makedirs(folder, exist_ok=True)
        with whole(os.path.join(folder, 'model.safetensors'), 'wb') as f:
            save_file(weights, f.name, metadata={'format': 'pt'})
        with whole(os.path.join(folder, 'config.json')) as f:
            json.dump(config, f, indent=1)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be written ({error})") from None


def main(argv):
    _, folders = read(argv, __doc__)
    if len(folders) == 3 and folders[0] == 'fetch':
        _, repository, folder = folders
        names = fetch_model(repository, folder)
        print(f"{folder}: {', '.join(names)}; go on with: python sample.py hf:{folder}")
        return
    if len(folders) != 2:
        raise UserError("name a checkpoint folder and a folder to write (python tools/hf.py "
                        "out/vanilla exported/vanilla), or: fetch OWNER/NAME FOLDER")
    checkpoint, exported = folders
    model, *_ = load_model(checkpoint, 'cpu')
    save_hf(model, exported)
    print(f"wrote {exported}")


if __name__ == '__main__':
    run(main)
