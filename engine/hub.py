"""
Models from Hugging Face.

    fetch_model('EleutherAI/pythia-410m', 'models/pythia')

fetches config.json, tokenizer.json and the weights, and nothing else: no code. Interrupted, it goes
on where it was with the same call. HF_ENDPOINT in the environment names a mirror.
"""

import json
import os
import re

from engine.download import LARGEST, Missing, Progress, fetch, hub
from engine.files import UserError, alone, on_disk
from engine.huggingface import read_description
from engine.tensors import INDEXES, files_of_index, read_bin, read_header

LARGEST_JSON = 2 ** 27      # bytes; the tokenizers of large vocabularies have some 20 MB


def fetch_model(repository, folder):
    """
    Download a model, OWNER/NAME, into a folder; what is there already and whole stays. Returns the
    names of the files of its weights. UserError for a repository that is not there, whose model is
    not supported, or that has no weights.
    """
    if not re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', repository, re.ASCII):
        raise UserError(f"{repository}: not a repository; name one as OWNER/NAME")
    with on_disk(folder, 'written'), alone(folder):
        fetch_file(repository, folder, 'config.json', check_json)
        read_description(folder)        # before the long download
        try:
            fetch_file(repository, folder, 'tokenizer.json', check_json)
        except Missing:
            print(f"{repository} has no tokenizer.json: put the model's into {folder}", flush=True)
        names = names_of_weights(repository, folder)
        for name in names:
            fetch_file(repository, folder, name, check_weights)
    return names


def names_of_weights(repository, folder):
    """The files of the weights: one, or those of an index; .safetensors if there are any."""
    for index in INDEXES:
        single = index.removesuffix('.index.json')
        try:
            fetch_file(repository, folder, single, check_weights)
            return [single]
        except Missing:
            pass
        try:
            fetch_file(repository, folder, index, files_of_index)
            return files_of_index(os.path.join(folder, index))
        except Missing:
            pass
    raise UserError(f"{repository}: has no weights, neither model.safetensors nor "
                    "pytorch_model.bin, whole or in parts")


def fetch_file(repository, folder, name, check):
    """Download one file unless it is there and passes `check`."""
    path = os.path.join(folder, name)
    if os.path.exists(path):
        try:
            check(path)
            return
        except UserError:
            pass                        # damaged since
    url = f"{hub()}/{repository}/resolve/main/{name}"
    with Progress(path, 0) as progress:
        largest = LARGEST_JSON if name.endswith('.json') else LARGEST
        fetch(url, path, check, progress, largest)


def check_json(path):
    """UserError if a file is no JSON object: a page that asks to log in, say."""
    try:
        with open(path, encoding='utf-8') as f:
            is_object = isinstance(json.load(f), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise UserError(f"{path}: no JSON object")


def check_weights(path):
    """UserError if a file of weights is not whole."""
    name = path.removesuffix('.part')   # as it is called until it is complete
    if name.endswith('.safetensors'):
        read_header(path)
    else:
        read_bin(path)
