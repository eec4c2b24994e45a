"""Real faults planted in today's default stack and in ours: the same model, the same data, the same fault; how many
trials end badly, and how.

Command: python -m benchmarks.faults run --out runs/faults        (needs torchdata: pip install torchdata)

The default stack is what its parts' documentation shows: Lightning's Trainer and LightningCLI, torch's DataLoader or
torchdata's StatefulDataLoader, Hugging Face datasets, transformers and PEFT. Faults and judges of our side are those of
tests/faults, tests/parity, tests/packing and tests/callbacks; only the default stack's side is written here.
"""
