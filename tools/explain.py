"""
What a model does with a prompt, position by position: its passes, when it stops, what it would say after each, and the
layers its values came from.

    python tools/explain.py out/ponder --start="def f(x):"
    python tools/explain.py out/depth_attn --start=FILE:prompt.txt --top=5

A step is a pass over the text (embedding, loop, chain) or a slot of the token (latent, pause). Its line shows the likeliest
next tokens, as if the model ended there: the last one is what it was trained for, unless it says "output" below.
"""

import sys
from dataclasses import dataclass
from os.path import abspath, dirname
from typing import Optional
from unittest import mock

import torch

sys.path.insert(0, dirname(dirname(abspath(__file__))))  # run from anywhere
import model as library
from engine.errors import run
from sample import encode_prompt, open_one


@dataclass
class ExplainSettings:
    """what to explain"""
    start: Optional[str] = None         # the prompt, or FILE:path (None: the end-of-text token, where documents start)
    top: int = 3                        # tokens shown after each step
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)

    def __post_init__(self):
        if self.top < 1: raise ValueError(f"top={self.top} must be at least 1")


@torch.inference_mode()
def look(model, idx):
    """
    What happens while a model in eval mode reads idx (T,), n being the most steps a token takes, V the vocabulary, L the layers:

        steps (T,) long     the steps each token took        logits (T,V)       the model's output
        halting [(T,), ..]  what its gates or router said    after (n,T,V)      logits after each step, as if it were the last
        values (T,L,L+1)    Depth-Attention, or None: the share of each layer's values that came from layer j, own ones on
                            the diagonal, in the token's last step; the last column is the same layer's earlier loops
    """
    c, T = model.config, len(idx)
    outputs, weights = [], []                               # of every pass; of every layer of every pass
    mix = library.depth_attention

    def spy(q, k, v, sources, mode):
        """Mixing the rows of a unit matrix in the place of values gives the weights themselves."""
        unit = torch.eye(len(sources) + 1, dtype=v.dtype, device=v.device)
        rows = [row.expand(*k.shape[:3], -1) for row in unit]
        weights.append(mix(q, k, rows[-1], list(zip([k_j for k_j, _ in sources], rows)), mode).mean(1))  # (1,S,sources + 1)
        return mix(q, k, v, sources, mode)

    def by_token(passes):
        """[(1,S,..)] -> (n,T,..): the passes, or the slots of the last one, which is the one that counts."""
        if passes[-1].size(1) == T: return torch.cat(passes)
        return passes[-1].unflatten(1, (T, -1))[0].transpose(0, 1)

    model.dense = True                                      # halting='router': all tokens in all passes
    hook = model.h[-1].register_forward_hook(lambda block, args, result: outputs.append(result[0]))
    try:
        with mock.patch.object(library, 'depth_attention', spy): logits = model(idx[None])[0][0]
    finally:
        hook.remove()
        model.dense = False
    after = model.head(model.ln_f(by_token(outputs)))       # (n,T,V)
    steps = model.steps[0] if model.steps is not None else torch.full((T,), len(after), device=idx.device)
    values = None
    if c.depth_attn:
        layers = []                                         # [(1,S,L,L+1)] of every pass
        for p in range(0, len(weights), c.n_layer):
            rows = [source_layers(w, layer, c) for layer, w in enumerate(weights[p:p + c.n_layer])]
            layers.append(torch.stack(rows, 2))
        values = by_token(layers)[steps - 1, torch.arange(T, device=idx.device)]
    return dict(steps=steps, logits=logits, halting=halting(model, T), after=after, values=values)


def source_layers(weights, layer, config):
    """Weights (1,S,n) of one layer's sources, in the order of GPT.layers, put at the layers they are of: (1,S,L+1)."""
    earlier = config.sources(layer)
    loops = weights.size(-1) - 1 - len(earlier)
    row = weights.new_zeros(*weights.shape[:2], config.n_layer + 1)
    row[..., -1] = weights[..., :loops].sum(-1)
    row[..., [*earlier, layer]] = weights[..., loops:]
    return row


def halting(model, T):
    """
    What decided on each token's steps. gate: a score (T,) after each pass; router: the probability (T,) of going on, after
    each step; mask: the probability (T,) of needing 0, 1, .. thoughts. Without halting none.
    """
    found = []
    for item in model.trace:
        if isinstance(item, tuple):                         # router: only the tokens that got there
            active, _, go_on = item
            found.append(active.put(go_on.new_zeros(1, T), go_on)[0])
        else: found += [item[0]] if item.dim() == 2 else item[0].unbind(-1)
    return found


def main(argv):
    s, model, tokenizer, _ = open_one(argv, __doc__.strip(), ExplainSettings, "python tools/explain.py out/ponder")
    idx = torch.tensor(encode_prompt(s.start, tokenizer, model.config.block_size), device=model.wte.weight.device)
    show(look(model, idx), model.config, idx, tokenizer, s.top)


def show(seen, config, idx, tokenizer, top):
    """Print a paragraph for each position."""
    def word(token):
        raw = tokenizer.decode_single_token_bytes(token)
        try: return repr(raw.decode())
        except UnicodeDecodeError: return repr(raw)[1:]  # a part of a character

    def likeliest(logits):
        best = logits.softmax(-1).topk(min(top, config.n_tokens))
        return '   '.join(f"{word(token)} {p:.3f}" for token, p in zip(best.indices.tolist(), best.values.tolist()))

    names = {'none': None, 'gate': 'gate', 'router': 'going on', 'mask': 'probability of 0, 1, .. thoughts'}
    said = names[config.halting]
    kind = 'slot' if config.ponder in ('latent', 'pause') else 'pass'
    for t, token in enumerate(idx.tolist()):
        n = seen['steps'][t].item()
        numbers = [f"{x[t]:.4f}" for x in seen['halting']]
        if said and said[0] != 'p': numbers = numbers[:n]  # of the steps that were taken
        count = f"{n} {kind}" + ('' if n == 1 else 's' if kind == 'slot' else 'es')
        print(f"{t:4d} {word(token)}   {count}" + (f"   {said} {' '.join(numbers)}" if said else ''))
        for k in range(n): print(f"       after {kind} {k + 1}   {likeliest(seen['after'][k, t])}")
        if not torch.allclose(seen['after'][n - 1, t], seen['logits'][t], atol=1e-3):  # a mixture of the steps
            print(f"       output         {likeliest(seen['logits'][t])}")
        if seen['values'] is not None: print(f"       values from    {sources(seen['values'][t])}")


def sources(values):
    """Of one token's values (L,L+1): the share of each layer, over all layers that have a choice."""
    others = values.clone()
    others.diagonal().zero_()
    first = int(len(values) > 1 and not others[0].any())    # layer 0 reads earlier loops or nothing
    *layers, loops = others[first:].mean(0).tolist()
    own = values.diagonal()[first:].mean().item()
    parts = [('the layer itself', own), *((f'layer {j}', share) for j, share in enumerate(layers)), ('earlier loops', loops)]
    return ', '.join(f"{name} {share:.0%}" for name, share in parts if share)


if __name__ == '__main__':
    run(main)
