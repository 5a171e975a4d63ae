"""
What a run needs around model.py, and what makes it fast where it is asked for. Nothing in here says
what is computed: model.py does, which imports nothing of this folder, and this equals it, tested.

    fast        fast.py         FastGPT: the joint; which part stands in the place of which
                attention.py    the kernel for each device, precision, mask and length
                memory.py       what attention reads, without joining and masking more than it must
                loss.py         the head and the cross-entropy in parts; recomputing in backward
                compile.py      torch.compile, CUDA graphs
    a run       start.py        the model that it starts from, and what must fit together
                generate.py     token by token, in batches, past the context
                hardware.py     device, precision, the processes of a run
                checkpoint.py   checkpoints: complete or absent
                flops.py        what a token costs
                run.py          what a run says and leaves behind, and what ends it early
                plan.py         what it would take
    pages       page.py         what tools/explain.py draws, with page.html
    released    released.py     Hugging Face folders: settings, weights, tokenizers
                variant.py      the blocks of released models that are not quite model.py's
    data        shards.py       tokenizers, token shards and their description
                windows.py      which tokens a step reads
                tasks.py        problems that take several steps of work
                answers.py      right answers to them
                download.py     over an unreliable network
                files.py        whole files; one line for what the user can mend
"""
