"""
What programs need around model.py, which imports nothing of this folder. model.py says what is
computed; here only variant.py says so too, for the blocks of released models. The parts that make
something faster (prepare, cpu, skip, decode) are functions around a model and change no result but
for rounding.

Read start.py and prepare.py to see how a run begins, then what you need:

    a model     build.py        GPT of a config, or its shapes alone
                mechanisms.py   what programs ask about a mechanism
                trained.py      one from a checkpoint's folder, with what that says of the run
    a command   command.py      config files that take back what stands before them
    training    start.py        the model that a run starts from, and what must fit together
                prepare.py      moved to its device, compiled, its blocks recomputed in backward
                cpu.py          two things that make a CPU quicker, and cost nothing
                skip.py         router without the tokens that stopped
                hardware.py     device, precision, the processes of a run
                muon.py         another optimizer than AdamW
                checkpoint.py   checkpoints: complete or absent
                log.py          what a run says and leaves behind, and what ends it early
                track.py        the same at TensorBoard, or Weights & Biases
    before it   flops.py        what a token costs: PyTorch counts
                plan.py         what a run would take: --dry_run
    after it    generate.py     token by token, in batches, past the context
                decode.py       the same compiled, with keys in places that never move
                score.py        what a text costs a model, token by token
                answers.py      right answers to the problems of a made task
                page.py         what tools/explain.py draws, with page.html
    data        shards.py       tokenizers, token shards and their description
                windows.py      which tokens a step reads
                tasks.py        problems that take several steps of work
                download.py     over an unreliable network
    released    released.py     Hugging Face folders: settings, weights, tokenizers
                variant.py      the blocks of released models that are not quite model.py's
    files       files.py        whole files; one line for what the user can mend
                sums.py         whether two pieces of source code compute the same
"""
