"""Measures everything that needs a GPU, on one page that is updated while the parts run: `make gpu`.

    python -m benchmarks.gpu                   on a machine with a GPU: writes benchmarks/gpu-<date>.md
    python -m benchmarks.gpu --device cpu      rehearsal with tiny models: writes runs/gpu-rehearsal-<date>/
    python3 -m benchmarks.gpu --bundle         on a bare machine, after `make gpu-bundle` (bundle.py)

1. `parts.py` lists the parts, most valuable first: "is it correct?", then "how fast is it?".
2. `run.py` runs each part in a separate process with its own time limit, all of them within one budget.
3. A part appends rows to a file while it measures, so a stopped part keeps its rows.
4. `page.py` renders all rows. Page and results.jsonl are replaced after every change, so a killed run leaves both.

The parts:
    machine.py    matrix products, copies, pinned memory, disk; the GPUs that an embedded Ray cluster sees
    suite.py      the tests marked `gpu`; in a rehearsal, the corresponding CPU tests
    campaigns.py  campaigns with a killed worker, compared bit for bit with an undisturbed twin
    steps.py      one training step of our models, timm's and transformers', one model on the device at a time
    engines.py    one step of our engine and of stock DeepSpeed: speed, memory, host CPU, idle share of the GPU
    tars.py       training from tars: share of time waiting for data, stalls of saves; planned memory

A rehearsal only shows that the command works; its numbers are meaningless for a GPU.
"""
