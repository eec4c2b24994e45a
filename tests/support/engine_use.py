"""The memory use of an offload engine as plain numbers, for leak tests and the records of benchmarks."""


def describe_use(engine):
    engine._collect()
    return {
        "pinned_bytes": engine.slab.num_bytes,
        "pinned_used_bytes": engine.slab.used_bytes,
        "staging_bytes": sum(slot.num_bytes for slot in engine.slots),
        "num_kept": engine.num_kept,
        "num_unplanned": engine.num_unplanned,
        "num_replaced": sum(slot.num_replaced for slot in engine.slots),
    }
