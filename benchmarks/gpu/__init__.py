"""Everything that only a GPU can show, on one page that grows while the parts run: `make gpu`.

    python -m benchmarks.gpu                   on a machine with a GPU: writes benchmarks/gpu-<date>.md
    python -m benchmarks.gpu --device cpu      rehearsal with tiny models: writes runs/gpu-rehearsal-<date>/
    python3 -m benchmarks.gpu --bundle         on a bare machine, after `make gpu-bundle` (bundle.py)

1. `parts.py` lists the parts in order of worth: first "is it correct?", then "how fast is it?".
2. `run.py` runs each part in a process of its own with its own time limit, all of them within one budget.
3. A part appends its rows to a file while it measures, so a part that is stopped keeps what it has measured.
4. `page.py` renders all rows. Page and results.jsonl are replaced after every change: a run that is killed leaves both.

The parts:
    machine.py    matrix products, copies, pinned memory, disk; the GPUs that an embedded Ray cluster sees
    suite.py      the tests marked `gpu`; in a rehearsal their twins on the CPU
    campaigns.py  campaigns with a killed worker, compared bit for bit with an undisturbed twin
    steps.py      one training step of our models, timm's and transformers', one model on the device at a time
    engines.py    one step of our engine and of stock DeepSpeed: speed, memory, host CPU, idle share of the GPU
    tars.py       training from tars: share of waiting for data, stalls of saves; planned memory

A rehearsal shows that the command works; its numbers say nothing about a GPU.
"""
