"""
What makes model.py fast, and what a run needs. Nothing in here says what is computed: model.py
does, which imports nothing of this folder, and this equals it, tested.

    faster      fast.py         FastGPT: the joint; which part stands in the place of which
                attention.py    the kernel for each device, precision, mask and length
                memory.py       what attention reads, without joining and masking more than it must
                loss.py         the head and the cross-entropy in parts; recomputing in backward
                generate.py     token by token, in batches whose rows do not wait for each other
                compile.py      torch.compile, CUDA graphs
    a run       start.py        the model that it starts from, and what must fit together
                hardware.py     device, precision, the processes of a run
                checkpoint.py   checkpoints: complete or absent
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
