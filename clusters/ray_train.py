"""Train with Ray Train: every worker runs a Trainer, and a failed job restarts from its newest checkpoint.

python clusters/ray_train.py --workers 16 --gpus --model Qwen/Qwen3-8B --data train.jsonl --out /shared/runs/first
"""

import argparse
from typing import Any

import ray
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchTrainer

from lightning_fastft import FastFTDDPStrategy, FineTuner, PackedDataModule, Watchdog


def train(options: dict[str, Any]) -> None:
    """Train on one worker. Ray has started the process group; all nodes have equally many workers."""
    # Seed, so that a restarted job draws the same initial adapters.
    seed_everything(options["seed"], verbose=False)
    context = ray.train.get_context()
    num_local = context.get_local_world_size()
    trainer = Trainer(
        accelerator="gpu" if options["gpus"] else "cpu",
        devices=num_local,
        num_nodes=context.get_world_size() // num_local,
        strategy=FastFTDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        max_steps=options["steps"],
        default_root_dir=options["out"],
        callbacks=[ModelCheckpoint(options["out"], every_n_train_steps=options["save"], save_last=True), Watchdog()],
        logger=False,
        enable_progress_bar=False,
    )
    tuner = FineTuner(options["model"], lora={"r": 16}, init=options["init"], dtype=options["dtype"])
    data = PackedDataModule(options["data"], max_tokens=options["tokens"])
    # ckpt_path="last" starts from the beginning in an empty folder.
    trainer.fit(tuner, data, ckpt_path="last")


def main() -> None:
    """Read the command line and run the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, help="a folder that all nodes share, as an absolute path")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save", type=int, default=100, help="optimizer steps between two checkpoints")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", default="pretrained")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--failures", type=int, default=10, help="failures after which the job is given up")
    options = vars(parser.parse_args())
    job = TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=options["workers"], use_gpu=options["gpus"]),
        run_config=RunConfig(
            storage_path=options["out"], name="ray", failure_config=FailureConfig(max_failures=options["failures"])
        ),
    )
    job.fit()


if __name__ == "__main__":
    main()
