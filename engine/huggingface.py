"""
Hugging Face folders: Llama and Qwen3 decoders, config.json and safetensors.
"""

from dataclasses import asdict


def load_state(folder):
    """
    A Hugging Face folder as `load_checkpoint` gives a checkpoint: a dict of config (of GPTConfig's
    fields), model (weights in float32) and step. UserError if the folder is missing, damaged or
    not supported.
    """
    from tools import hf
    return hf.load_state(folder)


def read_config(folder):
    """The config of a Hugging Face folder, of GPTConfig's fields; UserError if there is none."""
    from tools import hf
    return asdict(hf.read_config(folder))
