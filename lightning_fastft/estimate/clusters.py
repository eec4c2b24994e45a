"""Clusters of equal nodes, their links, and the times of ring collectives on them."""

from __future__ import annotations

from typing import NamedTuple

from lightning_fastft.core.errors import OptionError
from lightning_fastft.estimate.machines import Gpu

# Share of a link's published rate that a large ring reaches. Assumed.
LINK_SHARE = 0.8
# One hop of a ring. Source: latencies of the "simple" protocol in NCCL's tuning model, src/graph/tuning.cc.
NVLINK_HOP_MS, PCIE_HOP_MS, NETWORK_HOP_MS = 0.0034, 0.0057, 0.014
# Published rates in bytes/s, each way: 400 Gbit/s for each GPU (NDR, one adapter per GPU), and 100 Gbit/s for a node.
INFINIBAND_BYTES_PER_S, ETHERNET_BYTES_PER_S = 50e9, 12.5e9
# Device memory outside of torch's allocator: the CUDA context and the communicators of NCCL. Measured on four H100
# under FSDP2: 79.0 GiB in use where torch had reserved 77.1.
_OUTSIDE_BYTES = int(1.9 * 2**30)


class Cluster(NamedTuple):
    """GPUs in equal nodes, and the links between them.

    Args:
        gpu: Each GPU, with the memory that torch can have.
        num_gpus: GPUs of all nodes.
        num_nodes: Machines.
        node_bytes_per_s: Published rate of one GPU to the others of its node, in bytes/s each way.
        network_bytes_per_s: Published rate of a node to the others, in bytes/s each way, over all its adapters.
        node_link: Name of the link inside a node.
        network: Name of the link between nodes.
    """

    gpu: Gpu
    num_gpus: int
    num_nodes: int
    node_bytes_per_s: float
    network_bytes_per_s: float
    node_link: str
    network: str

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node."""
        return self.num_gpus // self.num_nodes


def make_cluster(gpu: Gpu, *, num_gpus: int, num_nodes: int, node_link: str = "", network: str = "") -> Cluster:
    """Return a cluster of equal nodes.

    Args:
        gpu: Each GPU.
        num_gpus: GPUs of all nodes.
        num_nodes: Machines.
        node_link: "nvlink", "pcie", or a rate in GB/s per GPU and direction; empty for the GPU's own.
        network: "infiniband" (400 Gbit/s per GPU), "ethernet" (100 Gbit/s per node), or a rate in GB/s per node and
            direction; empty for InfiniBand with NVLink and Ethernet without.

    Raises:
        OptionError: The nodes do not divide the GPUs, or a link is unknown, missing on this GPU or without use.

    Example:
        >>> from lightning_fastft.estimate.machines import find_gpu
        >>> make_cluster(find_gpu("H200"), num_gpus=64, num_nodes=8).network_bytes_per_s
        400000000000.0
    """
    if num_gpus % num_nodes:
        raise OptionError(f"--nodes {num_nodes} does not divide --gpus {num_gpus}. Give equal nodes.")
    if network and num_nodes == 1:
        raise OptionError("--network has no effect on one node. Give --nodes too, or remove it.")
    if node_link and num_nodes == num_gpus:
        raise OptionError("--node-link has no effect with one GPU per node. Remove it.")
    links = {"nvlink": gpu.nvlink_bytes_per_s, "pcie": gpu.link_bytes_per_s}
    node_link = node_link or ("nvlink" if gpu.nvlink_bytes_per_s else "pcie")
    rate = _rate("--node-link", node_link, links)
    if not rate and num_gpus > num_nodes:
        raise OptionError(f"{gpu.name} has no {node_link} between GPUs. Give --node-link a rate in GB/s.")
    network = network or ("infiniband" if node_link == "nvlink" else "ethernet")
    networks = {"infiniband": INFINIBAND_BYTES_PER_S * num_gpus / num_nodes, "ethernet": ETHERNET_BYTES_PER_S}
    titles = {"nvlink": "NVLink", "pcie": "PCIe", "infiniband": "InfiniBand", "ethernet": "Ethernet"}
    if num_gpus > 1:
        gpu = gpu._replace(memory_bytes=gpu.memory_bytes - _OUTSIDE_BYTES)
    return Cluster(
        gpu,
        num_gpus,
        num_nodes,
        rate,
        _rate("--network", network, networks),
        titles.get(node_link, "the link in a node"),
        titles.get(network, "the network"),
    )


def _rate(option: str, text: str, known: dict[str, float]) -> float:
    if text in known:
        return known[text]
    try:
        rate = float(text) * 1e9
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < float("inf"):
        raise OptionError(f"{option} must be {', '.join(known)} or a rate in GB/s above 0, got {text!r}.")
    return rate


class Rings:
    """Times of ring collectives on a cluster, and their sums by link.

    A ring moves (n - 1) / n of a message over each link, and an all-reduce is two of them.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.link_ms: dict[str, float] = {cluster.node_link: 0.0}
        self._cluster = cluster
        self._hop_ms = NVLINK_HOP_MS if cluster.node_link == "NVLink" else PCIE_HOP_MS

    def neighbours_ms(self, num_bytes: float, num_ranks: int, *, times: int = 1) -> float:
        """Return the time of an all-gather to, or a reduce-scatter of, num_bytes on ranks that follow each other."""
        cluster = self._cluster
        if num_ranks <= cluster.gpus_per_node:
            return self._ring(num_bytes, num_ranks, cluster.node_bytes_per_s, times=times, is_inside=True)
        # NCCL builds a ring per adapter, so that the adapters of a node carry the message together.
        rate = cluster.network_bytes_per_s
        if cluster.gpus_per_node > 1:
            rate = min(rate, cluster.node_bytes_per_s)
        return self._ring(num_bytes, num_ranks, rate, times=times)

    def groups_ms(self, num_bytes: float, group: int, *, times: int = 1) -> float:
        """Return the time of a reduce-scatter of num_bytes over equal ranks of all groups, every rank at once."""
        cluster = self._cluster
        num_groups = cluster.num_gpus // group
        if cluster.num_nodes == 1:
            return self._ring(num_bytes, num_groups, cluster.node_bytes_per_s, times=times, is_inside=True)
        # The ranks of a node share its adapters.
        rate = cluster.network_bytes_per_s / cluster.gpus_per_node
        return self._ring(num_bytes, num_groups, rate, times=times)

    def all_to_all_ms(self, num_bytes: float, num_ranks: int, *, times: int) -> float:
        """Return the time in which each rank sends its share of num_bytes to each other rank of its node."""
        return self._ring(num_bytes, num_ranks, self._cluster.node_bytes_per_s, times=times, is_inside=True)

    def _ring(self, num_bytes: float, num_ranks: int, rate: float, *, times: int, is_inside: bool = False) -> float:
        if num_ranks < 2 or not num_bytes:
            return 0.0
        link = self._cluster.node_link if is_inside else self._cluster.network
        hop_ms = self._hop_ms if is_inside else NETWORK_HOP_MS
        share = (num_ranks - 1) / num_ranks
        time_ms = times * (share * num_bytes / (LINK_SHARE * rate) * 1e3 + (num_ranks - 1) * hop_ms)
        self.link_ms[link] = self.link_ms.get(link, 0.0) + time_ms
        return time_ms
