"""
The machinery: what makes the five files at the top fast, exact and safe.

What model.py computes with equals plain PyTorch, and says which. Imports point one way: nothing in
this folder imports a file of the top level.

    thinking      attention.py   the attention kernel for each device, precision, mask and length
                  loss.py        the head and the cross-entropy in parts, recomputing in backward
                  memory.py      what attention may read: caches, and the passes before this one
                  slots.py       which tokens take the next pass
                  generate.py    token by token, in batches whose rows do not wait for each other
                  flops.py       what a pass costs
                  checks.py      settings of a model that do not fit together
                  inputs.py      what a model is called with
                  shapes.py      models without numbers, to check and plan with
                  variant.py     released models that are not quite model.py's GPT
                  neox.py        the block of GPT-NeoX, for those on Pythia
    running       hardware.py    device, precision, compiling, the processes of a run
                  start.py       the model that a run starts from
                  optimizer.py   AdamW, in one piece or shared out among ranks
                  checkpoint.py  checkpoints: complete or absent
                  state.py       what a loaded checkpoint has to be before anything uses it
                  room.py        whether the machine has the memory for it
                  output.py      the output folder, the log file, signals
                  log.py         what a run says of its steps and evaluations
                  plan.py        what a run would take
                  huggingface.py Hugging Face folders: their names and weights
                  hf_config.py   their config.json
                  tensors.py     files of weights, read one tensor at a time
                  errors.py      a line for what the user can mend
                  palette.py     the colours of terminal, pictures and pages
    data          shards.py      tokenizers, token shards and their description
                  windows.py     which tokens a step reads
                  tasks.py       problems that take several steps of work
                  bpe.py         Hugging Face's tokenizer.json
                  download.py    over an unreliable network
                  hub.py         models from Hugging Face
                  files.py       whole files, locked folders
"""
