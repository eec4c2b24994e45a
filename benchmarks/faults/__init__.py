"""Plant real faults in today's default stack and in ours, with the same model and data, and count the failed trials.

Command: python -m benchmarks.faults run --out runs/faults        (needs torchdata: pip install torchdata)

The default stack follows the documentation of its parts: Lightning's Trainer and LightningCLI, torch's DataLoader or
torchdata's StatefulDataLoader, Hugging Face datasets, transformers and PEFT. Faults and judges of our side are those of
tests/faults, tests/parity, tests/packing and tests/callbacks; only the default stack's side is written here.
"""
