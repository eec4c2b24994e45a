"""Check that the mesh sizes of a run fit its devices."""

from __future__ import annotations

from lightning_fastft.core.errors import OptionError


def check_mesh(num_devices: int, *, context_parallel: int, shard: int | None = None, expert_parallel: int = 1) -> None:
    """Check that the sizes of a mesh fit the devices.

    The number of copies of the weights is ``num_devices / shard``.

    Args:
        num_devices: Data-parallel devices of all machines.
        context_parallel: Devices that share each pack; a divisor of shard, or of the devices if nothing is sharded.
        shard: Devices that shard one copy of the weights, a divisor of the devices; None if nothing is sharded.
        expert_parallel: Devices that own the experts in shares: 1 or shard.

    Raises:
        OptionError: They do not fit; the message lists the sizes that do.

    Example:
        >>> check_mesh(8, shard=4, context_parallel=2, expert_parallel=4)
    """
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    shards = [size for size in divisors if size % context_parallel == 0]
    if not shards:
        fault = f"context_parallel must be {_either(divisors)}"
    elif shard is not None and shard not in shards:
        beside = f" with context_parallel={context_parallel}" if context_parallel > 1 else ""
        fault = f"shard must be {_either(shards)}{beside}"
    elif shard is not None and expert_parallel not in (1, shard):
        others = [size for size in shards if size not in (1, shard)]
        fault = f"expert_parallel must be 1 or shard={shard}"
        fault += f", and shard can be {_either(others)} as well" if others else ""
    else:
        return
    sizes = {"shard": shard, "context_parallel": context_parallel, "expert_parallel": expert_parallel}
    given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None and size != 1)
    raise OptionError(f"{given} on {num_devices} devices do not fit each other: {fault}.")


def _either(sizes: list[int]) -> str:
    """Return sizes as text, for example "1, 2 or 4"."""
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last
